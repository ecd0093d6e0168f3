"""How long the steps of a run are: beta of every token at every sublayer, for any scheme, counted in bins."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.analysis.inputs import float64_device, open_data, validation_windows
from spheret.analysis.sublayers import check_finite
from spheret.kernels.closed import dots
from spheret.model.probes import Sublayer, probe
from spheret.runs.run import Run

# the edges of the bins: 16 per factor of two, from 2^-12 to 8. Steps outside count in the first or last bin
BIN_EDGES = tuple(2.0 ** (power / 16) for power in range(-12 * 16, 3 * 16 + 1))


class SublayerSteps(NamedTuple):
    """The steps of one sublayer. `retraction` and `alpha` are None if its update is no retraction."""

    sublayer: int
    branch: str
    retraction: str | None
    alpha: float | None
    median: float
    # the number of tokens per bin of BIN_EDGES
    counts: list[int]


class RunSteps(NamedTuple):
    """The steps of one checkpoint."""

    run: str
    scheme: str
    checkpoint: int
    tokens: int
    sublayers: list[SublayerSteps]


@torch.no_grad()
def step_lengths(s: Sublayer) -> Tensor:
    """beta of every token, (...), in float64.

    For a retraction it is alpha |z|/|h|. For any other connection it is the step of the metric projection that turns
    the state as far: the tangent of the angle between h and the next state, and infinity from 90 degrees on.
    """
    step = s.connection.retraction_step()
    if step is None:
        angle = s.angle.double()
        return torch.where(angle < math.pi / 2, angle.tan(), math.inf)
    hh, _, zz = dots(s.h.double(), s.f.double())
    return (step.alpha.double() * torch.where(hh == 0, 0.0, (zz / hh).sqrt())).squeeze(-1)


def bin_counts(beta: Tensor) -> list[int]:
    """How many of the steps lie in each bin of BIN_EDGES."""
    edges = torch.tensor(BIN_EDGES[1:-1], dtype=torch.float64, device=beta.device)
    bins = torch.bucketize(beta.flatten(), edges, right=True)
    return [int(count) for count in bins.bincount(minlength=len(BIN_EDGES) - 1)]


def _measure(s: Sublayer) -> SublayerSteps:
    step, beta = s.connection.retraction_step(), step_lengths(s)
    if beta.isnan().any():
        raise ValueError(f"the stream is not finite after sublayer {s.number}: its steps have no length.")
    median = float(beta.median())
    return SublayerSteps(
        s.number,
        s.kind,
        None if step is None else step.retraction.name,
        None if step is None else float(step.alpha),
        # a number that JSON has
        min(median, BIN_EDGES[-1]),
        bin_counts(beta),
    )


@torch.no_grad()
def run_steps(run: Run, windows: int = 4, data: str | None = None, device: str = "cpu") -> RunSteps:
    """The steps of a run's newest checkpoint on some windows of the validation split."""
    place = float64_device(device)
    model, saved = run.load(None, place)
    check_finite(model, f"checkpoint step-{saved.step} of {run.path}")
    source = open_data(run, data)
    time = max(1, min(model.config.block, source.tokens("val") - 1))
    x, _ = validation_windows(source, model.config.block, windows * time)
    measured: list[SublayerSteps] = []
    with probe(model, lambda s: measured.append(_measure(s))):
        model.stream(x.to(place))
    return RunSteps(run.name, model.config.scheme, saved.step, x.numel(), measured)
