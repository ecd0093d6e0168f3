"""Coordinate checks: rules that hold are flat, and the absence of rules is not."""

import pytest
from coordinate_check import LOGITS, powers


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("scheme", ["pre-ln", "proj-spheretnorm", "ngpt"])
def test_completep_makes_updates_of_the_stream_flat_and_standard_does_not(scheme, optimizer):
    for size, (_, updates) in powers(scheme, "completep", optimizer).items():
        stream = {name: value for name, value in updates.items() if name != LOGITS}
        assert max(map(abs, stream.values())) < 0.3, (size, stream)
    for size, (states, updates) in powers(scheme, "standard", optimizer).items():
        # the sqrt schedule of a spherical stream does a part of the depth rule by itself
        if size == "width" or scheme != "proj-spheretnorm":
            # a state may shrink with the size
            assert max(*states.values(), *map(abs, updates.values())) > 0.35, (size, states, updates)


# an untied head has a rule of its own
@pytest.mark.parametrize(
    ("scheme", "head"), [("proj-spheretnorm", "shifted"), ("proj-spheretnorm", "untied"), ("ngpt", "untied")]
)
def test_completep_holds_for_every_head(scheme, head):
    tied = powers(scheme, "completep")
    for size, (_, updates) in powers(scheme, "completep", head=head).items():
        # at these widths the logits of every head still move less in a wider model
        assert updates[LOGITS] == pytest.approx(tied[size][1][LOGITS], abs=0.2)
        stream = {name: value for name, value in updates.items() if name != LOGITS}
        assert max(map(abs, stream.values())) < 0.3, (size, stream)
