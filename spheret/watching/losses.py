"""What the losses of a training say: spikes, and a plateau at the entropy of the token frequencies."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spheret.model.monitor import ENTROPY_MARGIN
from spheret.support.precision import wide
from spheret.watching.observations import Finding, Measured
from spheret.watching.processes import Processes

SPIKE_WINDOW, SPIKE_LEAST, SPIKE_Z = 64, 20, 5.0
# the median of so many losses is compared, because one batch may be easier or harder than all
PLATEAU_WINDOW = 10
# a healthy run passes the unigram entropy within these updates; a collapsed one stays there. While it does, the
# sublayers are measured this often
COLLAPSE_UPDATES, COLLAPSE_LOOK = 20, 10
COLLAPSED_COSINE = 0.95


def on_plateau(losses: Sequence[float], unigram_entropy: float) -> bool:
    """Whether the median of the last PLATEAU_WINDOW losses, the newest last, lies at the unigram entropy."""
    if len(losses) < PLATEAU_WINDOW:
        return False
    return abs(statistics.median(losses[-PLATEAU_WINDOW:]) - unigram_entropy) < ENTROPY_MARGIN * unigram_entropy


@dataclass(frozen=True)
class LossState:
    """What a `LossGuard` remembers from step to step."""

    spikes: int
    alarmed: bool
    losses: list[float]


class LossGuard:
    """Counts spikes of the loss, and finds a collapse: all states share one direction, and the loss does not fall.

    Args:
        unigram_entropy: that of the token frequencies, in the unit of the loss, if it is known.
    """

    def __init__(self, unigram_entropy: float | None) -> None:
        self.unigram_entropy = unigram_entropy
        self.spikes = 0
        self.alarmed = False
        self.losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def state(self) -> LossState:
        return LossState(self.spikes, self.alarmed, list(self.losses))

    def restore(self, state: LossState) -> None:
        self.spikes, self.alarmed = state.spikes, state.alarmed
        self.losses.clear()
        self.losses.extend(state.losses)

    def loss(self, value: float) -> None:
        """Count a spike: a loss more than SPIKE_Z standard deviations above the mean of the last losses."""
        if len(self.losses) >= SPIKE_LEAST:
            mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
            self.spikes += value > mean + SPIKE_Z * max(deviation, 1e-6)
        self.losses.append(value)

    def stays_on_plateau(self) -> bool:
        """Whether the loss was at the unigram entropy at each of the last COLLAPSE_UPDATES updates."""
        entropy, losses = self.unigram_entropy, list(self.losses)
        if entropy is None or len(losses) < COLLAPSE_UPDATES:
            return False
        return all(on_plateau(losses[: len(losses) - ago], entropy) for ago in range(COLLAPSE_UPDATES))

    def suspects_collapse(self, step: int) -> bool:
        """Whether the sublayers must be measured after this update, although it is not time."""
        return not self.alarmed and step % COLLAPSE_LOOK == 0 and self.stays_on_plateau()

    def collapse(self, sublayers: Iterable[Measured]) -> Finding | None:
        """The alarm, once: all states share one direction and the loss stays at the unigram entropy."""
        cosine, worst = max(
            ((_number(each.cosine), each) for each in sublayers), key=lambda pair: pair[0], default=(0.0, None)
        )
        if worst is None or self.alarmed or cosine < COLLAPSED_COSINE or not self.stays_on_plateau():
            return None
        self.alarmed = True
        return Finding(kind="collapsed", sublayer=worst.sublayer, measured="cosine", now=cosine)

    def collapse_sentence(self, finding: Finding, name: Callable[[int], str]) -> str:
        """What the alarm says, at the step of the finding. name: what a sublayer is called."""
        assert finding.sublayer is not None
        recent = statistics.fmean(list(self.losses)[-COLLAPSE_UPDATES:])
        return (
            f"token collapse: after {name(finding.sublayer)} the states of different tokens have a mean cosine of "
            f"{finding.now:.3f}, and the loss {recent:.3f} stays at the unigram entropy {self.unigram_entropy:.3f}"
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class WaitingLosses:
    """Losses that are not known yet. On a GPU they are read when they are wanted, and nobody waits before."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Tensor | float]] = []

    def add(self, step: int, loss: Tensor | float) -> None:
        self.waiting.append((step, loss.detach().clone() if isinstance(loss, Tensor) else float(loss)))

    def known(self, wait: bool, processes: Processes) -> list[tuple[int, float]]:
        """Those that are known; all of them with `wait`. Several processes take their mean, all at the same steps."""
        at_hand = processes.size == 1 and all(_at_hand(loss) for _, loss in self.waiting)
        if not self.waiting or not (wait or at_hand):
            return []
        steps = [step for step, _ in self.waiting]
        values = torch.stack([wide(torch.as_tensor(loss)).reshape(()) for _, loss in self.waiting])
        values = processes.sum(values) / processes.size
        self.waiting = []
        return list(zip(steps, values.tolist(), strict=True))


def _at_hand(loss: Tensor | float) -> bool:
    return not isinstance(loss, Tensor) or loss.device.type == "cpu"
