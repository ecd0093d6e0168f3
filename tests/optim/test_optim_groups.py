"""`spheret.parameter_groups` of other people's models: what decays, as in timm, and what goes to Muon."""

import pytest
import timm_process
import torch
import transformers
from torch import nn

from spheret import GPT, GPTConfig, Head, ScaleNorm, SpheretNorm, parameter_groups
from spheret.optim import Muon


class Vision(nn.Module):
    """A small vision transformer with what timm's have at their top level."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, 8, 4, stride=4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.table = nn.Parameter(torch.randn(3, 4))
        self.entry_norm, self.mlp, self.norm = ScaleNorm(8), nn.Linear(8, 8), SpheretNorm(8, 1, branch_norm=True)
        self.head = nn.Linear(8, 2)

    def no_weight_decay(self):
        return {"tab*"}

    def forward(self, images):
        h = self.patch_embed(images).flatten(2).mT
        h = self.entry_norm(torch.cat([self.cls_token.expand(len(h), 1, 8), h], 1) + self.pos_embed)
        return self.head(self.norm(h, self.mlp(h))[:, 0]) + self.table.sum()


def names(model, groups):
    known = {parameter: name for name, parameter in model.named_parameters()}
    return [{known[parameter] for parameter in group["params"]} for group in groups]


@pytest.mark.parametrize("prefix", ["", "inner."])
def test_what_decays(prefix):
    model = Vision() if not prefix else nn.ModuleDict({"inner": Vision()})
    decay, keep = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
    assert decay.keys() == keep.keys() == {"params", "weight_decay"}
    decaying, keeping = names(model, [decay, keep])
    assert decaying == {f"{prefix}{name}.weight" for name in ("patch_embed", "mlp", "head")}
    assert {f"{prefix}{name}" for name in ("cls_token", "pos_embed", "table", "norm.a", "entry_norm.gamma")} < keeping
    assert len(decaying) + len(keeping) == len(list(model.parameters()))
    model.requires_grad_(False)
    assert names(model, parameter_groups(model, 0.1)) == [set(), set()]


def test_hidden_matrices_are_for_muon():
    model = Vision()
    hidden, decay, keep = parameter_groups(model, 0.1, muon=True)
    assert names(model, [hidden, decay])[0] == {"mlp.weight"}
    assert names(model, [hidden, decay])[1] == {"patch_embed.weight", "head.weight"}
    assert [group["use_muon"] for group in (hidden, decay, keep)] == [True, False, False]
    assert names(model, [keep]) == names(model, parameter_groups(model, 0.1)[1:])
    gpt = GPT(GPTConfig(layers=1, heads=2, width=16, block=8, vocab=20))
    by_heights = {group["heights"]: len(group["params"]) for group in parameter_groups(gpt, 0.1, muon=True)[:-2]}
    assert by_heights == {(16, 16, 16): 1, (16,): 2, (64,): 1}


class Classifier(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.mlp, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        for part in name.split(".")[:0:-1]:
            self.last = nn.ModuleDict({part: self.last})
        if name != "last":
            self.add_module(name.split(".")[0], self.last)
            del self.last

    def get_output_embeddings(self):
        return getattr(self, "last", None)


@pytest.mark.parametrize("name", ["lm_head", "score", "classifier", "head.fc", "last"])
def test_a_head_is_for_adamw(name):
    model = Classifier(name)
    hidden, decay, _ = names(model, parameter_groups(model, 0.1, muon=True))
    assert (hidden, decay) == ({"mlp.weight"}, {f"{name}.weight"})


def test_a_model_without_hidden_matrices_is_not_for_muon():
    config = transformers.GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="muon"):
        parameter_groups(transformers.GPT2LMHeadModel(config), 0.1, muon=True)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.mlp = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = Head(self.tokens, torch.ones(20))

    def forward(self, x):
        return self.head(self.mlp(self.tokens(x)))


@pytest.mark.parametrize("ours", [True, False])
def test_they_train(ours):
    """Our Muon takes all groups, torch's two optimisers a part each."""
    torch.manual_seed(0)
    model, x = Decoder(), torch.randint(20, (4, 9))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = parameter_groups(model, 0.1, muon=True)
    optimizers = [Muon(groups)]
    if not ours:
        optimizers = [
            torch.optim.Muon([group for group in groups if group["use_muon"]], adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([group for group in groups if not group["use_muon"]]),
        ]
    nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not any(torch.equal(before[name], p) for name, p in model.named_parameters())


SCRIPT = """
import timm
from timm.optim import param_groups_weight_decay

import spheret

small = dict(img_size=32, num_classes=5)
models = {
    "vit_tiny_patch16_224": dict(small, depth=1, class_token=True, reg_tokens=2),
    "swin_tiny_patch4_window7_224": dict(small, depths=(1, 1), num_heads=(3, 6), window_size=4),
    "beit_base_patch16_224": dict(small, depth=1),
    "cait_xxs24_224": dict(small, depth=1),
    "deit_tiny_distilled_patch16_224": dict(small, depth=1),
}
results = {}
for name, options in models.items():
    model = timm.create_model(name, **options)
    known = {parameter: name for name, parameter in model.named_parameters()}
    theirs = param_groups_weight_decay(model, 0.05, no_weight_decay_list=getattr(model, "no_weight_decay", set)())
    both = theirs, spheret.parameter_groups(model, 0.05)
    results[name] = [
        {str(group["weight_decay"]): sorted(known[p] for p in group["params"]) for group in groups} for groups in both
    ]
    hidden = {p for group in spheret.parameter_groups(model, 0.05, muon=True)[:-2] for p in group["params"]}
    heads = model.get_classifier()
    assert hidden.isdisjoint(head.weight for head in (heads if isinstance(heads, tuple) else [heads])), name
    assert {p.dim() for p in hidden} == {2}
print(json.dumps(results))
"""


@pytest.mark.slow
def test_what_decays_is_what_timm_decays():
    results = timm_process.run(SCRIPT)
    for theirs, ours in results.values():
        assert theirs == ours
    kept = {name.rpartition(".")[2] for _, ours in results.values() for name in ours["0.0"]}
    assert kept > {"cls_token", "pos_embed", "reg_token", "relative_position_bias_table"}
