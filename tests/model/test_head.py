"""How logits read the stream: the tied, the shifted and the untied head, for every scheme."""

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from small_models import TINY, randomize, tokens

from spheret import GPT, SCHEMES, GPTConfig, Shift, scheme
from spheret.connections import Spherical
from spheret.model.head import HEADS, own_logit
from spheret.optim import hidden_matrices

VOCAB = 256
# the own logit of a tied head at 12 x 64
OWN = {"pre-ln": 1.0, "post-ln": 3.1} | {name: 3.1 for name in SCHEMES if isinstance(scheme(name), Spherical)}
# its branches turn the stream from the start on
OWN["normed-spheretnorm"] = 2.6


def start(head, name, **changes):
    """The own logit and the first loss of a new model on random tokens."""
    options = {"layers": 12, "heads": 4, "width": 64, "block": 64, "vocab": VOCAB, **changes}
    torch.manual_seed(0)
    model = GPT(GPTConfig(scheme=name, head=head, **options))
    x, y = (tokens(2, options["block"], options["vocab"], seed) for seed in (1, 2))
    with torch.no_grad():
        logits = model(x)
    return own_logit(logits, x), float(F.cross_entropy(logits.flatten(0, 1), y.flatten()))


def tiny(head, name="proj-spheretnorm", **changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, "scheme": name, "head": head, **changes}))


class TestStart:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_every_scheme(self, name):
        starts = {head: start(head, name) for head in HEADS}
        for head in ("shifted", "untied"):
            own, loss = starts[head]
            assert abs(own) <= 0.2
            # the spread of the logits alone
            assert -0.05 <= loss - math.log(VOCAB) <= 0.25
        own, loss = starts["tied"]
        assert own == pytest.approx(OWN[name], abs=0.3) if name in OWN else own >= 0.05
        # ln((V - 1 + e^own) / V), which the current token takes from the others
        if own >= 2.5:
            assert loss - starts["shifted"][1] == pytest.approx(math.log1p(math.expm1(own) / VOCAB), abs=0.05)

    @pytest.mark.parametrize(("name", "own"), [("proj-spheretnorm", 10.8), ("pre-ln", 1.0)])
    def test_at_the_width_of_the_papers_size_s(self, name, own):
        """Two layers of its twelve. What a block writes starts so small that their sum does not depend on depth."""
        shape = {"layers": 2, "heads": 12, "width": 768, "vocab": 1024}
        assert start("tied", name, **shape)[0] == pytest.approx(own, abs=0.3)
        assert abs(start("shifted", name, **shape)[0]) <= 0.2

    def test_own_logit_is_above_the_mean(self):
        logits = torch.tensor([[[3.0, 1.0, 2.0], [0.0, 6.0, 0.0]]])
        assert own_logit(logits, torch.tensor([[0, 1]])) == (1 + 4) / 2
        assert own_logit(logits, torch.tensor([[1, 0]], dtype=torch.int32)) == (-1 - 2) / 2


class TestDraws:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_the_same_blocks_for_every_head(self, name):
        models = {head: tiny(head, name) for head in HEADS}
        for again in (False, True):
            for model in models.values() if again else ():
                torch.manual_seed(3)
                model.reset_parameters()
            states = {head: dict(model.named_parameters()) for head, model in models.items()}
            own = states["untied"].pop("head.weight")
            for head in HEADS:
                assert states[head].keys() == states["tied"].keys()
                assert all(torch.equal(p, states["tied"][each]) for each, p in states[head].items())
            # drawn as the embedding is, and not the embedding
            assert own.std().item() == pytest.approx(states["tied"]["tokens.weight"].std().item(), rel=0.1)
            assert not torch.equal(own, states["tied"]["tokens.weight"])

    def test_a_head_is_no_hidden_matrix(self):
        models = {head: tiny(head) for head in HEADS}
        assert models["untied"].head.weight not in hidden_matrices(models["untied"])
        assert len({len(hidden_matrices(model)) for model in models.values()}) == 1


@lru_cache
def scrambled(head, name, head_bias="zero", **changes):
    return randomize(tiny(head, name, head_bias=head_bias, **changes)).double().eval()


def plain_logits(model, x, weights):
    """The formula with the parameters in `weights`, by torch's own functions: the head is a matrix."""
    h = torch.func.functional_call(_Stream(model), {f"model.{name}": p for name, p in weights.items()}, (x,))
    width = model.config.width
    if model.config.head == "shifted":
        h = torch.cat([h[..., width - width // 2 :], h[..., : width - width // 2]], -1)
    y = h @ weights["head.weight" if model.config.head == "untied" else "tokens.weight"].T
    if model.logit_norm is not None:
        y = y * model.logit_norm(torch.ones_like(y))
    return y + weights["head_bias"]


class _Stream(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.stream(x)


SOME = ("pre-ln", "proj-spheretnorm", "ngpt", "attn-res")


@pytest.mark.parametrize(
    ("head", "name"), [(head, name) for head in HEADS for name in (SCHEMES if head == "shifted" else SOME)]
)
class TestEveryScheme:
    def test_logits_losses_and_gradients_are_those_of_the_formula(self, head, name):
        model, x, y = scrambled(head, name), tokens(), tokens(seed=1)
        weights = dict(model.named_parameters())
        truth = plain_logits(model, x, weights)
        torch.testing.assert_close(model(x), truth, rtol=0, atol=1e-12)
        losses = F.cross_entropy(truth.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
        torch.testing.assert_close(model.token_losses(x, y), losses.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(model(x, y), losses.mean(), rtol=0, atol=1e-12)
        wanted = [weights[key] for key in ("tokens.weight", "head_bias", *(["head.weight"] * (head == "untied")))]
        wanted.append(model.blocks[0].attention.qkv.weight)
        gradients = (torch.autograd.grad(loss, wanted, retain_graph=True) for loss in (model(x, y), losses.mean()))
        for got, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)

    def test_a_plain_head_computes_the_same(self, head, name):
        model, x = scrambled(head, name), tokens()
        with torch.no_grad():
            logits = F.linear(model.stream(x), model.plain_head(), model.head_bias)
            torch.testing.assert_close(logits, model(x), rtol=0, atol=1e-12)


def test_ngpts_constraint_holds_for_the_untied_head():
    model = tiny("untied", "ngpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(2):
        torch.testing.assert_close(model.head.weight.norm(dim=1), torch.ones(TINY["vocab"]))
        if not step:
            before = model.head.weight.detach().clone()
            model(tokens(), tokens(seed=1)).backward()
            optimizer.step()
            assert not torch.equal(model.head.weight, before)
    with torch.no_grad():
        model.head.weight.mul_(2)
    model.constrain(held={id(model.tokens.weight)})
    assert model.head.weight.norm(dim=1).min() > 1.9


class TestShift:
    @pytest.mark.parametrize("width", [2, 5, 16])
    def test_what_it_does(self, width):
        """Also at an odd width: it is a permutation, and `fold` moves it into the weight that follows."""
        shift, x = Shift(width), torch.arange(2.0 * width).view(2, width)
        assert shift(x)[0, width // 2] == x[0, 0]
        assert torch.equal(shift(torch.eye(width)) @ shift(torch.eye(width)).T, torch.eye(width))
        assert not (shift(torch.eye(width)).diagonal()).any()
        weight = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(x @ shift.fold(weight).T, shift(x) @ weight.T)
        assert torch.equal(shift.fold(shift(weight)), weight)
        assert not list(shift.state_dict())
        assert repr(shift) == f"Shift({width})"

    def test_an_odd_model(self):
        model = scrambled("shifted", "pre-ln", width=15, heads=3)
        logits = plain_logits(model, tokens(), dict(model.named_parameters()))
        torch.testing.assert_close(model(tokens()), logits, rtol=0, atol=1e-12)


class TestConfig:
    def test_the_default_is_written_too(self):
        config = GPTConfig(**TINY)
        assert config.as_dict()["head"] == "tied"
        for head in HEADS:
            changed = replace(config, head=head)
            assert GPTConfig.from_dict(changed.as_dict()) == changed
