"""muP and CompleteP: a base model is not changed, and what is changed is what their sources change."""

import math
from contextlib import ExitStack

import pytest
import torch

from spheret import GPT, SCHEMES, GPTConfig
from spheret.bounds import inverse_softplus
from spheret.model.head import HEADS
from spheret.optim import AdamW, Factors, Muon, build_optimizer, groups, hidden_matrices, set_learning_rate
from spheret.optim.parametrization import parametrize
from spheret.runs.config import TrainConfig

# what the settings were tuned for, and the model that is trained: twice as wide, twice as deep, heads twice as wide
BASE = {"layers": 2, "heads": 2, "width": 16, "block": 8, "vocab": 32, "head": "tied", "head_bias": "none"}
LARGE = {**BASE, "layers": 4, "width": 32}
SIZES = {
    "mup": {"base_width": 16, "base_heads": 2},
    "completep": {"base_width": 16, "base_heads": 2, "base_layers": 2},
}
# what each refuses, with a word of the reason
REFUSED = {
    "mup": {"rezero": "norm before the head"},
    "completep": {
        "rezero": "norm before the head",
        **dict.fromkeys(("deepnorm", "keel", "lns", "layerscale", "beam", "vp-gate"), "a rule of its own"),
    },
}


def config(parametrization="standard", **changes):
    sizes = SIZES.get(parametrization, {})
    given = {"lr": 1e-2, "min_lr": 0.0, "parametrization": parametrization, **sizes, **changes}
    return TrainConfig(steps=1, batch_size=1, tokens_per_update=1, warmup=0, checkpoint_every=1, **given)


def new(shape, scheme="pre-ln", **options):
    torch.manual_seed(0)
    return GPT(GPTConfig(scheme=scheme, scheme_options=options, **shape))


@pytest.mark.parametrize("parametrization", SIZES)
@pytest.mark.parametrize(
    ("scheme", "head"),
    [*((scheme, "tied") for scheme in SCHEMES), *(("proj-spheretnorm", head) for head in HEADS if head != "tied")],
)
def test_a_base_model_keeps_every_bit_and_a_large_one_gets_finite_factors(scheme, head, parametrization):
    one_stream = SCHEMES[scheme]().one_stream
    reason = REFUSED[parametrization].get(scheme) if one_stream else f"{scheme} carries more than one"
    small, large = ({**shape, "head": head} for shape in (BASE, LARGE))
    base = new(small, scheme)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            parametrize(base, config(parametrization))
        return
    factors = parametrize(base, config(parametrization))
    assert set(factors.values()) == {Factors()}
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), new(small, scheme).parameters(), strict=True))
    for optimizer in ("adamw", "muon"):
        factors = parametrize(new(large, scheme), config(parametrization, optimizer=optimizer))
        assert factors.get("head.weight", factors["tokens.weight"]) == factors["tokens.weight"]
        for factor in factors.values():
            assert 0.1 < factor.lr < 10
            assert factor.lr * factor.weight_decay == pytest.approx(1)


def test_the_standard_parametrization_has_no_factors():
    model = new(LARGE)
    assert parametrize(model, config()) == {}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), new(LARGE).parameters(), strict=True))


def test_a_scheme_without_a_norm_before_the_head_is_refused():
    with pytest.raises(ValueError, match=r"norm before the head.*proj-spheretnorm"):
        parametrize(new(LARGE, "proj-spheretnorm", final_norm=False), config("mup"))


@pytest.mark.parametrize("parametrization", SIZES)
def test_heads_that_do_not_fit_the_base(parametrization):
    # the base has one head of 16 entries; this model has 6 heads, of which 3 share a head of keys
    shape = {**LARGE, "width": 48, "heads": 6, **MODERN, "kv_heads": 2}
    asked = config(parametrization, base_heads=1)
    assert parametrize(new(shape), asked)["blocks.0.attention.qkv_norm.q_norm.weight"].lr == pytest.approx(2**0.25)


def test_learning_rates_of_groups():
    factors = parametrize(new(BASE), config(matrix_lr=2e-2, embedding_lr=5e-3))
    assert factors["blocks.0.mlp.hidden.weight"] == Factors(2.0)
    assert factors["tokens.weight"] == factors["positions.weight"] == Factors(0.5)
    assert "final_norm.weight" not in factors
    both = parametrize(new(LARGE), config("mup", matrix_lr=2e-2))
    # decay follows the rule, not the rate that was asked for
    assert both["blocks.0.mlp.hidden.weight"] == Factors(1.0, 2.0, 0.5)


def test_unit_weights_have_learning_rates_alone():
    factors = parametrize(new(LARGE, "ngpt"), config("completep"))
    root = math.sqrt(0.5)
    assert factors["blocks.0.mlp.hidden.weight"].lr == pytest.approx(0.5)
    assert factors["tokens.weight"].lr == pytest.approx(root)
    assert factors["blocks.0.attention.qkv_norm.weight"].lr == pytest.approx(root)
    # the step is half as long at twice the depth
    assert factors["blocks.0.mlp_connection.norm.a"].lr == pytest.approx(root / 2)


# the factors of the sources on activations: what a branch adds, and the depth's factor on it
LAST_LAYER, OUTPUT_NORM = (
    (lambda block: (block.attention.output, block.mlp.output)),
    (lambda block: (block.attention_connection.output_norm, block.mlp_connection.output_norm)),
)
SQRT_SUMS = math.fsum(l**-0.5 for l in range(1, 5)) / math.fsum(l**-0.5 for l in range(1, 9))
EXPLICIT = {
    "pre-ln": (LAST_LAYER, 0.5),
    "post-ln": (LAST_LAYER, 0.5),
    "peri-ln": (OUTPUT_NORM, 0.5),
    "proj-spheretnorm": (LAST_LAYER, SQRT_SUMS),
    "res-post": (OUTPUT_NORM, 0.5),
    # queries, keys and values are normed
    "hybridnorm": (LAST_LAYER, 0.5),
}
# a backbone with matrices of other heights, and gains between the projection and the scores
MODERN = {"positions": "rope", "mlp": "swiglu", "norm": "rmsnorm", "qk_norm": True, "kv_heads": 1, "bias": False}
CASES = [
    *((scheme, {}) for scheme in EXPLICIT),
    ("pre-ln", MODERN),
    ("proj-spheretnorm", MODERN),
    # an untied head is an output weight: it starts as the base's and keeps its rate; the norm before it carries 1/m
    *((scheme, {"head": head}) for scheme in ("post-ln", "proj-spheretnorm") for head in HEADS[1:]),
]


def with_multipliers(scheme, backbone, stack):
    """A large model with CompleteP's factors in its forward pass, as its authors write them."""
    branches, depth = EXPLICIT[scheme]
    model = new({**LARGE, **backbone}, scheme).double()
    for block in model.each_block():
        for module in branches(block):
            stack.enter_context(module.register_forward_hook(lambda module, args, y: depth * y))

        # scores divided by the width of a head, which is twice the base's
        def scores(module, args, y):
            if isinstance(y, tuple):
                return math.sqrt(0.5) * y[0], *y[1:]
            return torch.cat([math.sqrt(0.5) * y[..., :32], y[..., 32:]], -1)

        attention = block.attention
        stack.enter_context((attention.qkv_norm or attention.qkv).register_forward_hook(scores))
    last = model.blocks[-1].mlp_connection.outer_norm if scheme == "post-ln" else model.final_norm
    stack.enter_context(last.register_forward_hook(lambda module, args, y: 0.5 * y))
    hidden = hidden_matrices(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # widths below 768 draw hidden matrices in proportion to 1/sqrt(width) already
            if parameter.dim() >= 2 and parameter not in hidden:
                parameter *= math.sqrt(2)
            if name.endswith("output.weight"):
                parameter *= math.sqrt(2)
    return model, depth


def reference_groups(model, depth, optimizer, scheme):
    """The groups of CompleteP's own code, with Muon's learning rate where it takes part."""
    hidden, made = hidden_matrices(model), []
    for name, parameter in model.named_parameters():
        inside = name.startswith("blocks.")
        epsilon = groups.EPSILON / 2 * (depth if inside else 1)
        group = {"params": [parameter], "lr": 1e-2, "weight_decay": 0.1, "eps": epsilon, "heights": None}
        if parameter in hidden:
            factor = math.sqrt(0.5) if optimizer == "muon" else 0.5
            heights = hidden[parameter] if optimizer == "muon" else None
            group |= {"lr": 1e-2 * factor, "weight_decay": 0.1 / factor, "heights": heights}
        elif parameter.dim() < 2:
            group["weight_decay"] = 0.0
        if name == "entry_norm.gamma":
            group["lr"] *= inverse_softplus(math.sqrt(32)) / inverse_softplus(4.0)
        made.append(group)
    return made


def losses_of(model, optimizer):
    x = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("scheme", "backbone"), CASES)
def test_weights_that_carry_the_factors_train_as_factors_do(scheme, backbone, optimizer, monkeypatch):
    # as large as the gradients, so that a wrong factor on it shows
    monkeypatch.setattr(groups, "EPSILON", 1e-3)
    model, asked = new({**LARGE, **backbone}, scheme), config("completep", optimizer=optimizer)
    factors = parametrize(model.double(), asked)
    ours = build_optimizer(model, optimizer, 1e-2, 0.1, (0.9, 0.95), torch.device("cpu"), factors)
    set_learning_rate(ours, 1e-2)
    carried = losses_of(model, ours)
    with ExitStack() as stack:
        reference, depth = with_multipliers(scheme, backbone, stack)
        kind = Muon if optimizer == "muon" else AdamW
        theirs = kind(reference_groups(reference, depth, optimizer, scheme), lr=1e-2, betas=(0.9, 0.95))
        explicit = losses_of(reference, theirs)
    assert carried == pytest.approx(explicit, rel=1e-9)
    # four updates have moved the loss by far more than that
    assert abs(carried[-1] - carried[0]) > 1e-2
