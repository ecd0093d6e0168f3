"""The lengths of a model's steps: beta is the number whose angle is the angle of the update."""

import math
from itertools import pairwise

import pytest
import torch
from small_models import TINY, randomize, tokens

from spheret import RETRACTIONS, SCHEMES
from spheret.analysis.step_lengths import BIN_EDGES, bin_counts, step_lengths
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.probes import probe


def sublayers(scheme, **options):
    model = randomize(GPT(GPTConfig(**TINY, scheme=scheme, scheme_options=options)).double().eval())
    records = []
    with torch.no_grad(), probe(model, records.append):
        model.stream(tokens())
    assert len(records) == 4
    return records


@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_the_angle_of_the_step_is_the_angle_of_the_update(retraction):
    row = RETRACTIONS[retraction]
    for s in sublayers("proj-spheretnorm", retraction=retraction):
        angle = row.angle(step_lengths(s))
        expected = angle if row.cap is None else angle.clamp(max=row.cap)
        torch.testing.assert_close(s.angle, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_steps(scheme):
    for s in sublayers(scheme):
        beta = step_lengths(s)
        assert beta.shape == s.h.shape[:-1]
        assert (beta >= 0).all()
        assert sum(bin_counts(beta)) == beta.numel()
        if s.connection.retraction_step() is None:
            torch.testing.assert_close(beta.atan(), s.angle.clamp(max=math.pi / 2), rtol=0, atol=1e-9)


def test_a_state_of_zeros_takes_no_step():
    s = sublayers("proj-spheretnorm")[0]
    s.state = torch.zeros_like(s.state)
    assert (step_lengths(s) == 0).all()


def test_bins():
    middles = [math.sqrt(low * high) for low, high in pairwise(BIN_EDGES)]
    assert bin_counts(torch.tensor(middles, dtype=torch.float64)) == [1] * len(middles)
    # an edge belongs to the bin above it, and what lies outside to the first and the last
    at_edges = bin_counts(torch.tensor([BIN_EDGES[5], 0.0, math.inf, BIN_EDGES[-1]], dtype=torch.float64))
    assert {bin: count for bin, count in enumerate(at_edges) if count} == {5: 1, 0: 1, len(middles) - 1: 2}
