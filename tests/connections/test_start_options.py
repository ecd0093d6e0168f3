"""What a spherical stream starts with: the options output_init, radius, learnable_alpha and alpha."""

import json
import math

import pytest
import torch
from oracle import rows

from spheret import GPT, GPTConfig, ScaleNorm, SpheretNorm, scheme
from spheret.connections.parse import parse_schemes
from spheret.kernels import retract
from spheret.model.monitor import on_bound

D, SUBLAYERS = 16, 4
SPHERICAL = ("geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm")
DEFAULTS = {"output_init": "scaled", "radius": "sqrt", "learnable_alpha": True, "alpha": 1.0}
# one value of each option that is not its default
OTHERS = {"output_init": "full", "radius": 2.5, "learnable_alpha": False, "alpha": 0.25}


def model(name="proj-spheretnorm", **options):
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, heads=2, width=D, block=8, vocab=32, scheme=name, scheme_options=options))


def changed(first, second):
    """The names of the parameters in which two models differ, or that only one of them has."""
    a, b = first.state_dict(), second.state_dict()
    return {key for key in a.keys() | b.keys() if key not in a or key not in b or not torch.equal(a[key], b[key])}


def steps(options, name="proj-spheretnorm"):
    """The step sizes of all sublayers, divided by lambda_l."""
    norms = [scheme(name, **options).connect(D, sublayer, SUBLAYERS).norm for sublayer in range(1, SUBLAYERS + 1)]
    return [norm.alpha.item() / norm.factor for norm in norms]


@pytest.mark.parametrize("name", SPHERICAL)
class TestEachScheme:
    def test_defaults_change_nothing(self, name):
        assert changed(model(name), model(name, **DEFAULTS)) == set()

    @pytest.mark.parametrize(
        ("option", "ends"),
        [
            ("output_init", ("attention.output.weight", "mlp.output.weight")),
            ("radius", ("entry_norm.gamma",)),
            ("learnable_alpha", ("connection.norm.a",)),
            ("alpha", ("connection.norm.a",)),
        ],
    )
    def test_an_option_changes_its_parameters_and_no_other(self, name, option, ends):
        plain, other = model(name), model(name, **{option: OTHERS[option]})
        assert changed(plain, other) == {key for key in plain.state_dict() if key.endswith(ends)}

    @pytest.mark.parametrize("option", OTHERS)
    def test_the_command_line_and_json(self, name, option):
        value = OTHERS[option]
        (choice,) = parse_schemes(f"{name}:{option}={value if isinstance(value, str) else json.dumps(value)}")
        assert choice.build() == scheme(name, **{option: value})
        config = GPTConfig(width=D, heads=2, scheme=name, scheme_options={option: value})
        assert GPTConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config

    @pytest.mark.parametrize("learnable", [True, False])
    def test_the_step_size_starts_at_a_share_of_lambda(self, name, learnable):
        for alpha in (1e-3, 0.25, 1, 1.0):
            got = steps({"alpha": alpha, "learnable_alpha": learnable}, name)
            assert got == pytest.approx([alpha] * SUBLAYERS, rel=1e-6)


class TestOutputInit:
    def test_the_weights_that_write_are_as_large_as_all_others(self):
        scaled, full = (model(output_init=value).state_dict() for value in ("scaled", "full"))
        for key in scaled:
            factor = math.sqrt(SUBLAYERS) if key.endswith("output.weight") else 1.0
            torch.testing.assert_close(full[key], factor * scaled[key])
        assert scheme("proj-spheretnorm", output_init="full").initialisation(SUBLAYERS).output == 1


class TestRadius:
    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("radius", [1, 1.0, 2.5, 4, "sqrt"])
    def test_the_stream_enters_there(self, radius, exact):
        norm = scheme("proj-spheretnorm", radius=radius, exact_clamp=exact).enter(D)
        value = 4.0 if radius == "sqrt" else radius
        assert norm.radius_value() == pytest.approx(value, rel=1e-6)
        torch.testing.assert_close(norm(rows(5, D)).norm(dim=-1), torch.full((5,), float(value)).double())
        # it is learned from there
        norm(rows(5, D)).sum().backward()
        assert norm.gamma.grad.abs() > 0

    def test_reset(self):
        norm = ScaleNorm(D, radius=2.5)
        torch.nn.init.zeros_(norm.gamma)
        norm.reset_parameters()
        assert norm.radius.item() == pytest.approx(2.5)

    @pytest.mark.parametrize("radius", [4.1, 100])
    def test_beyond_sqrt_d_is_found_before_a_model_is_built(self, radius):
        message = rf"radius must be \"sqrt\" or a number from 1 to sqrt\(dim\) = 4 at width 16, got {radius}"
        built = scheme("proj-spheretnorm", radius=radius)
        with pytest.raises(ValueError, match=message):
            built.enter(D)
        with pytest.raises(ValueError, match=message):
            GPTConfig(width=D, heads=2, scheme="proj-spheretnorm", scheme_options={"radius": radius})


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

    def test_a_step_leaves_it_alone(self):
        norm = SpheretNorm(D, 3, retraction=0.5, learnable_p=True, learnable_alpha=False)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
        norm(rows(5, D), rows(5, D, seed=1)).sum().backward()
        norm.drop_outward_gradients()
        optimizer.step()
        norm.project_scalars()
        assert [name for name, _ in norm.named_parameters()] == ["raw_p"]
        assert norm.alpha.item() == 1 / math.sqrt(3)

    def test_repr(self):
        assert repr(SpheretNorm(D, 1, learnable_alpha=False)).endswith("no cap, fixed alpha)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_init": "half"}, "output_init of proj-spheretnorm must be scaled or full, got 'half'"),
        ({"radius": "sqr"}, "radius of proj-spheretnorm must be a number or sqrt, got 'sqr'"),
        ({"radius": True}, "radius of proj-spheretnorm must be a number or sqrt, got True"),
        ({"radius": 0.5}, "a number from 1 to sqrt.dim., got 0.5: the paper's modified ScaleNorm keeps"),
        ({"radius": 0}, "a number from 1 to sqrt.dim., got 0"),
        ({"radius": math.inf}, "a number from 1 to sqrt.dim., got inf"),
        ({"radius": 2.0, "entry_norm": False}, "radius = 2.0 is where .* entry_norm = False removes it"),
        ({"learnable_alpha": 0}, "learnable_alpha of proj-spheretnorm must be true or false, got 0"),
        ({"alpha": 0.0}, "alpha must be a number greater than 0 and at most 1, got 0.0"),
        ({"alpha": 1.5}, "alpha must be a number greater than 0 and at most 1, got 1.5"),
        ({"alpha": "one"}, "alpha of proj-spheretnorm must be a number, got 'one'"),
        ({"alpha": True}, "alpha of proj-spheretnorm must be a number, got True"),
    ],
)
def test_wrong_values(options, message):
    with pytest.raises(ValueError, match=message):
        scheme("proj-spheretnorm", **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ScaleNorm(D, radius="root"), "radius must be .* got 'root'"),
        (lambda: ScaleNorm(D, radius=True), "radius must be .* got True"),
        (lambda: SpheretNorm(D, 1, alpha=True), "alpha must be .* got True"),
        (lambda: SpheretNorm(D, 1, alpha="1"), "alpha must be .* got '1'"),
        (lambda: type(scheme("geonorm"))(output_init="fall"), "unknown output_init 'fall'"),
    ],
)
def test_wrong_values_of_the_classes(build, message):
    with pytest.raises(ValueError, match=message):
        build()
