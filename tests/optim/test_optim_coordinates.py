"""Coordinate checks: rules that hold are flat, and the absence of rules is not."""

from dataclasses import dataclass, replace

import pytest

from spheret.connections.parse import parse_schemes
from spheret.optim.coordinates import LOGITS, Coordinates, Setting, is_flat, measure, power, powers, sweep, worst


@dataclass(frozen=True)
class WithHead(Setting):
    head: str = "tied"

    def shape(self, width, layers):
        return replace(super().shape(width, layers), head=self.head)


def found(scheme, parametrization, optimizer="adamw", head="tied"):
    setting = WithHead(parse_schemes(scheme)[0], parametrization, optimizer, 1e-3, 3, 2, 16, 1, 16, 2, head)
    sizes = {"width": [(16, 2), (64, 2)], "layers": [(16, 2), (16, 8)]}
    return {size: powers(sweep(setting, shapes, lambda: None), size) for size, shapes in sizes.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("scheme", ["pre-ln", "proj-spheretnorm", "ngpt"])
def test_completep_makes_updates_of_the_stream_flat_and_standard_does_not(scheme, optimizer):
    for size, ruled in found(scheme, "completep", optimizer).items():
        states = {name: value for name, value in ruled["updates"].items() if name != LOGITS}
        assert max(map(abs, states.values())) < 0.3, (size, states)
    for size, plain in found(scheme, "standard", optimizer).items():
        # the sqrt schedule of a spherical stream does a part of the depth rule by itself
        if size == "width" or scheme != "proj-spheretnorm":
            assert worst(plain)[1] > 0.35, (size, plain)
            assert not is_flat(plain)


@pytest.mark.parametrize("head", ["shifted", "untied"])
@pytest.mark.parametrize("scheme", ["pre-ln", "proj-spheretnorm", "ngpt"])
def test_completep_holds_for_every_head(scheme, head):
    tied = found(scheme, "completep")
    for size, ruled in found(scheme, "completep", head=head).items():
        # at these widths the logits of every head still move less in a wider model
        logits = ruled["updates"].pop(LOGITS)
        assert logits == pytest.approx(tied[size]["updates"][LOGITS], abs=0.2)
        assert max(map(abs, ruled["updates"].values())) < 0.3, (size, ruled["updates"])


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_generator_alone():
    setting = Setting(parse_schemes("pre-ln")[0], "mup", "adamw", 1e-3, 1, 1, 4, 1, 8, 1)
    assert measure(setting, 16, 1, 0) == measure(setting, 16, 1, 0)
    assert measure(setting, 16, 1, 0) != measure(setting, 16, 1, 1)


def test_powers_and_the_worst_of_them():
    assert power([2, 4, 8], [3, 12, 48]) == pytest.approx(2)

    def row(width):
        # shrinking states are allowed; an update that shrinks is not
        return Coordinates(width, 1, {"0%": width**-2.0}, {"0%": width**-0.5, LOGITS: width**0.1})

    ruled = powers([row(8), row(16), row(32), row(64)], "width")
    assert worst(ruled) == ("the update of the state at 0% of the depth", pytest.approx(-0.5))
    assert worst({"states": {"0%": 0.4}, "updates": {LOGITS: -0.3}}) == ("the state at 0% of the depth", 0.4)
    assert worst({"states": {}, "updates": {"0%": 0.4, LOGITS: float("nan")}})[0] == "the update of the logits"
