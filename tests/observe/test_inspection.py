"""One observation of a model: against hand-made cases, torch's own gradients, and its export to another library."""

import math

import pytest
import torch
from saved_decoders import CONFIGS, build
from small_models import randomize
from trained_models import config, trained, windows

import spheret
from spheret import GPT, SCHEMES
from spheret.model.probes import probe
from spheret.observe import inspection
from spheret.observe.inspection import anatomy_of, gradients, inspect, removals, removed, seen_whole

KINDS = {
    "gemma2": "norms around", "gemma3": "norms around", "olmo2": "norm behind", "gpt-1": "post-norm",
}  # fmt: skip
PARALLEL = ("gpt-neox", "phi")
IDS = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(1))


def test_effective_rank():
    assert inspection.effective_rank(torch.eye(6)) == pytest.approx(6)
    assert inspection.effective_rank(torch.outer(torch.rand(9), torch.rand(4))) == pytest.approx(1, abs=1e-6)
    # two equal directions and nothing else
    assert inspection.effective_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0]))) == pytest.approx(2)


def test_consecutive_updates():
    e = torch.eye(2)
    states = [torch.zeros(1, 2), e[:1], e[:1] + e[1:], e[:1]]
    assert inspection.update_cosines(states) == [None, 0.0, -1.0]


def test_a_removed_sublayer_leaves_the_stream():
    model = trained("pre-ln")
    x, _ = windows()
    third = anatomy_of(model, x).sublayers[2]
    seen = []
    with torch.no_grad(), removed(third, dict(model.named_modules())), probe(model, lambda s: seen.append(s.h)):
        model.stream(x)
    whole = []
    with torch.no_grad(), probe(model, lambda s: whole.append((s.h, s.out))):
        model.stream(x)
    assert torch.equal(seen[3], whole[1][1])
    assert torch.equal(whole[3][0], whole[2][1])
    assert not torch.equal(whole[3][0], whole[1][1])


def test_removing_a_branch_of_zeros_changes_nothing():
    torch.manual_seed(0)
    model = GPT(config("pre-ln")).eval()
    with torch.no_grad():
        for p in model.blocks[1].mlp.output.parameters():
            p.zero_()
    rises, note = removals(model, anatomy_of(model, windows()[0]), *windows())
    assert rises[3] == 0
    assert all(rise != 0 for rise in rises[:3])
    assert note == ""


def test_gradients_are_those_of_backward_and_leave_none():
    torch.manual_seed(0)
    model = GPT(config("proj-spheretnorm")).eval()
    x, y = windows()
    weight = model.blocks[0].mlp.hidden.weight
    weight.grad = torch.ones_like(weight)
    norms, streams = gradients(model, anatomy_of(model, x), x, y)
    assert torch.equal(weight.grad, torch.ones(128, 32))
    assert sum(p.grad is not None for p in model.parameters()) == 1
    model.zero_grad()
    states = []

    def keep(sublayer):
        sublayer.h.retain_grad()
        states.append(sublayer.h)

    with probe(model, keep):
        model(x, y).backward()
    for index, part in enumerate(["attention", "mlp"] * 2):
        block = model.blocks[index // 2]
        squares = [
            p.grad.double().square().sum()
            for name in (part, f"{part}_connection")
            for p in getattr(block, name).parameters()
        ]
        assert norms[index] == pytest.approx(float(sum(squares).sqrt()), rel=1e-4)
        assert streams[index] == pytest.approx(float(states[index].grad.norm()), rel=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name):
    model = trained(name, steps=3)
    record = inspect(model, *windows())
    assert record.loss == pytest.approx(float(model(*windows()).detach()), rel=1e-4)
    assert (len(record.sublayers), record.windows, record.note) == (4, 4, "")
    for index, sublayer in enumerate(record.sublayers):
        assert 1 <= sublayer.effective_rank <= 32
        assert -1 <= sublayer.cosine <= 1 + 1e-9
        assert sublayer.massive >= 1
        assert sublayer.moved > 0
        assert not sublayer.inactive
        assert (sublayer.sink is None) == (index % 2 == 1)
        measured = ("norm", "angle_mean", "removal", "grad_norm", "stream_grad_norm")
        assert all(math.isfinite(getattr(sublayer, key)) for key in measured)
    assert all(p.grad is None for p in model.parameters())
    if name.endswith("spheretnorm") or name == "geonorm":
        norms = [sublayer.norm for sublayer in record.sublayers]
        assert norms == pytest.approx([record.entry_norm] * 4, rel=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name):
    """Other people's models: every sublayer is found and removed, and afterwards the model is as it was."""
    model = build(name)
    with torch.no_grad():
        before = model(IDS, use_cache=False).logits
    record = inspect(model.train(), IDS[:, :-1], IDS[:, 1:])
    assert all(module.training for module in model.modules())
    assert record.note == ""
    expected = ["parallel"] * 2 if name in PARALLEL else ["attention", "mlp"] * 2
    assert [each.branch for each in record.sublayers] == expected
    kinds = {found.norms for found in anatomy_of(model, IDS).sublayers}
    assert kinds == {KINDS.get(name, "pre-norm")}
    assert all(each.removal != 0 and each.grad_norm > 0 and each.stream_grad_norm > 0 for each in record.sublayers)
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS, use_cache=False).logits, before)
    # without the first sublayer the second one is given what the first one was
    anatomy = anatomy_of(model, IDS)
    with torch.no_grad(), removed(anatomy.sublayers[0], dict(model.named_modules())):
        first, second, *_ = seen_whole(model, anatomy, lambda: inspection.call(model, IDS)).sublayers
    assert torch.equal(first.states[0], second.states[0])


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0])
def test_a_converted_model(t):
    """At t = 0 it is the original."""
    plain = inspect(build("llama"), IDS[:, :-1], IDS[:, 1:])
    model, _ = spheret.convert(build("llama"), example_inputs={"input_ids": IDS, "use_cache": False})
    spheret.conversion.anneal(model, t)
    record = inspect(model, IDS[:, :-1], IDS[:, 1:])
    assert record.note == ""
    assert all(each.removal != 0 and each.angle_mean > 0 for each in record.sublayers)
    assert [each.branch for each in record.sublayers] == [each.branch for each in plain.sublayers]
    # before t = 1 the stream carries its length
    norms = [each.norm for each in record.sublayers]
    assert (norms == pytest.approx([record.entry_norm] * 4, rel=1e-5)) == (t == 1)
    for key in ("removal", "norm", "angle_mean", "grad_norm"):
        same = [getattr(each, key) for each in record.sublayers] == pytest.approx(
            [getattr(each, key) for each in plain.sublayers], rel=1e-3
        )
        assert same == (t == 0), key


def reference_of_streams(mixes, streams):
    """What is said of the matrices (tokens, n, n) of all sublayers and the streams (tokens, n, width) behind them."""
    count = mixes[0].shape[-1]
    product, rows = torch.eye(count, dtype=torch.float64), []
    for mix, x in zip(mixes, streams, strict=True):
        product = mix @ product
        cosines = torch.nn.functional.cosine_similarity(x[:, :, None], x[:, None], dim=-1)
        pairs = cosines[:, ~torch.eye(count, dtype=torch.bool)]
        distances = [(mix - other).square().sum((-2, -1)).sqrt().mean() / count**0.5
                     for other in (torch.eye(count), torch.full((count, count), 1 / count))]  # fmt: skip
        largest = mix.abs().max(-1).values / mix.abs().sum(-1)
        gain = torch.linalg.svdvals(product)[:, 0]
        rows.append([float(x) for x in (pairs.mean(), *distances, largest.mean(), gain.mean())])
    return rows


@pytest.mark.parametrize("name", SCHEMES)
def test_streams(name):
    """Of schemes with several streams, against the definitions; of all others nothing is said."""
    torch.manual_seed(0)
    model = randomize(GPT(config(name)).double(), 0.3)
    x, y = windows()
    mixes, streams = [], []

    def keep(connection, args, out):
        mix = connection.mixing(args[0])
        if mix is not None:
            count = mix.shape[-1]
            streams.append(out[0].flatten(0, -3))
            mixes.append(mix.expand(*out[0].shape[:-2], count, count).flatten(0, -3))

    for module in model.modules():
        if isinstance(module, spheret.Connection):
            module.register_forward_hook(keep)
    with torch.no_grad():
        model.eval()(x)
    wanted = reference_of_streams(mixes, streams) if mixes else []
    keys = ("stream_cosine", "mix_from_identity", "mix_from_uniform", "mix_saturation", "mix_gain")
    found = [[getattr(each, key) for key in keys] for each in inspect(model, x, y).sublayers]
    assert bool(mixes) == hasattr(spheret.scheme(name), "streams")
    if not mixes:
        assert found == [[None] * len(keys)] * 4
        return
    for row, values in zip(found, wanted, strict=True):
        assert row == pytest.approx(values, rel=1e-9)
