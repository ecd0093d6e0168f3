"""The options of the spherical schemes: from Python, the command line and JSON, and what a stream starts with."""

import json
import math
from dataclasses import replace

import pytest
import torch
from oracle import rows

from spheret import GPT, RETRACTIONS, GPTConfig, Retraction, ScaleNorm, SpheretNorm, angular, retract, scheme
from spheret.connections.parse import parse_schemes
from spheret.connections.spherical import Spherical
from spheret.observe.measures import on_bound

D, SUBLAYERS = 16, 4
# the p, the cap and the schedule of each row, and the step size of sublayer 4
SPHERICAL = {
    "proj-spheretnorm": (1.0, None, "sqrt", 0.5),
    "cay-spheretnorm": (2.0, math.pi / 4, "sqrt", 0.5),
    "p-spheretnorm": (0.5, None, "sqrt", 0.5),
    "geonorm": (math.inf, math.pi / 4, "harmonic", 0.25),
}
OWN = Retraction.from_angle(torch.tanh, "tanh")
# what starts elsewhere, a value that is not the default, and the parameters that it changes
STARTS = {
    "output_init": ("full", ("attention.output.weight", "mlp.output.weight")),
    "radius": (2.5, ("entry_norm.gamma",)),
    "learnable_alpha": (False, ("connection.norm.a",)),
    "alpha": (0.25, ("connection.norm.a",)),
}


def update(chosen, sublayer=1):
    return chosen.connect(D, sublayer, 8).norm


def config(name="proj-spheretnorm", **options):
    return GPTConfig(layers=2, heads=2, width=D, block=8, vocab=32, scheme=name, scheme_options=options)


def model(*arguments, **options):
    torch.manual_seed(0)
    return GPT(config(*arguments, **options))


@pytest.mark.parametrize("name", SPHERICAL)
class TestEachScheme:
    def test_its_own_p_cap_and_schedule(self, name):
        built, (p, cap, schedule, alpha) = scheme(name), SPHERICAL[name]
        assert built.p == replace(built, bias=False).p == scheme(name, p=None).p == p
        norm = update(built, 4)
        assert (norm.p, norm.max_angle, norm.schedule) == (p, cap, schedule)
        assert norm.alpha.item() == pytest.approx(alpha)

    @pytest.mark.parametrize("retraction", RETRACTIONS)
    def test_every_retraction(self, name, retraction):
        for each in (retraction, RETRACTIONS[retraction]):
            norm = update(scheme(name, retraction=each))
            assert norm.retraction is RETRACTIONS[retraction]
            assert norm.max_angle == RETRACTIONS[retraction].cap

    @pytest.mark.parametrize("option", STARTS)
    def test_an_option_changes_its_parameters_and_no_other(self, name, option):
        value, ends = STARTS[option]
        a, b = (each.state_dict() for each in (model(name), model(name, **{option: value})))
        changed = {key for key in a.keys() | b.keys() if key not in b or not torch.equal(a[key], b[key])}
        assert changed == {key for key in a if key.endswith(ends)}
        (choice,) = parse_schemes(f"{name}:{option}={value if isinstance(value, str) else json.dumps(value)}")
        assert choice.build() == scheme(name, **{option: value})

    @pytest.mark.parametrize("learnable", [True, False])
    def test_the_step_size_starts_at_a_share_of_lambda(self, name, learnable):
        for alpha in (1e-3, 0.25, 1, 1.0):
            built = scheme(name, alpha=alpha, learnable_alpha=learnable)
            norms = [update(built, sublayer) for sublayer in range(1, SUBLAYERS + 1)]
            assert [norm.alpha.item() / norm.factor for norm in norms] == pytest.approx([alpha] * SUBLAYERS, rel=1e-6)


@pytest.mark.parametrize("p", [0.3, 0.9, 1, 1.5, 2.0, math.inf])
def test_p_is_short_for_a_number(p):
    for short in (scheme("p-spheretnorm", p=p), scheme("p-spheretnorm", retraction=p)):
        assert update(short).p == p
        assert update(short).max_angle == angular(p).cap
    assert Spherical().p == 1.0


def test_caps_and_retractions_of_your_own():
    assert update(scheme("p-spheretnorm", learnable_p=True)).max_angle == math.pi / 4
    assert update(scheme("geonorm", max_angle=0.1)).max_angle == 0.1
    assert update(scheme("proj-spheretnorm", retraction=OWN)).retraction is OWN
    assert replace(scheme("geonorm", retraction="cayley"), bias=False).retraction == "cayley"


@pytest.mark.parametrize(
    ("options", "written"),
    [
        *(({"retraction": RETRACTIONS[name]}, {"retraction": name}) for name in RETRACTIONS),
        ({"retraction": 0.3}, {"retraction": 0.3}),
        *(({option: value}, {option: value}) for option, (value, _) in STARTS.items()),
    ],
    ids=repr,
)
def test_json(options, written):
    document = json.loads(json.dumps(config(**options).as_dict()))
    assert document["scheme_options"] == written
    assert GPTConfig.from_dict(document) == config(**written)


@pytest.mark.parametrize("own", [OWN, angular(0.3)], ids=repr)
def test_a_retraction_outside_the_table_is_an_error_where_it_is_written(own):
    with pytest.raises(ValueError, match="RETRACTIONS"):
        config(retraction=own).as_dict()


def test_the_block_index_counts_blocks():
    def alphas(count, **options):
        built = scheme("proj-spheretnorm", index="block", **options)
        return [built.connect(D, sublayer, count).norm.alpha.item() for sublayer in range(1, count + 1)]

    assert alphas(8) == pytest.approx([1 / math.sqrt(block) for block in (1, 1, 2, 2, 3, 3, 4, 4)])
    assert alphas(8, schedule="linear") == pytest.approx([1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25])
    # half a block
    assert alphas(3, schedule="linear") == pytest.approx([1, 1, 0.5])
    assert alphas(5, schedule="harmonic") == pytest.approx([1, 1, 1 / 2, 1 / 2, 1 / 3])


def test_the_weights_that_write_are_as_large_as_all_others():
    scaled, full = (model(output_init=value).state_dict() for value in ("scaled", "full"))
    for key in scaled:
        factor = math.sqrt(SUBLAYERS) if key.endswith("output.weight") else 1.0
        torch.testing.assert_close(full[key], factor * scaled[key])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("radius", [1, 1.0, 2.5, 4, "sqrt"])
def test_the_stream_enters_at_the_radius(radius, exact):
    norm = scheme("proj-spheretnorm", radius=radius, exact_clamp=exact).enter(D)
    value = 4.0 if radius == "sqrt" else radius
    assert norm.radius_value() == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(norm(rows(5, D)).norm(dim=-1), torch.full((5,), float(value)).double())
    # it is learned from there
    norm(rows(5, D)).sum().backward()
    assert norm.gamma.grad.abs() > 0
    torch.nn.init.zeros_(norm.gamma)
    norm.reset_parameters()
    assert norm.radius.item() == pytest.approx(value)


def test_norms_beside_the_update():
    built = scheme("proj-spheretnorm")
    assert isinstance(update(built), SpheretNorm)
    assert isinstance(built.connect(D, 1, 2).inner_norm, torch.nn.Identity)
    assert isinstance(built.enter(D), ScaleNorm)
    for bias in (True, False):
        built = scheme("proj-spheretnorm", inner_norm=True, bias=bias)
        connection = built.connect(D, 1, 2).double()
        assert all((norm.bias is not None) == bias for norm in (connection.inner_norm, built.exit(D)))
        h = 3 + 2 * rows(5, D)
        torch.testing.assert_close(connection.read(h), torch.nn.functional.layer_norm(h, (D,)))
    built = scheme("proj-spheretnorm", entry_norm=False, final_norm=False)
    assert all(isinstance(norm, torch.nn.Identity) for norm in (built.enter(D), built.exit(D)))


class TestFixedAlpha:
    def test_it_is_no_parameter(self):
        fixed, learned = model(learnable_alpha=False), model()
        assert learned.parameter_count() - fixed.parameter_count() == SUBLAYERS
        assert on_bound(fixed) == ["entry_norm.gamma"]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_the_update_is_that_of_the_number(self, dtype):
        norm = SpheretNorm(D, 3, learnable_alpha=False, alpha=0.5, dtype=dtype)
        h, f = rows(5, D).to(dtype), rows(5, D, seed=1).to(dtype)
        assert torch.equal(norm(h, f), retract(h, f, 0.5 / math.sqrt(3)))
        assert norm.angle(h, f).dtype == torch.promote_types(dtype, torch.float32)
