"""What helps, as flags for a run of `spheret train`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spheret.model.config import GPTConfig

if TYPE_CHECKING:
    from spheret.runs.config import TrainConfig

# a warm-up of this many updates kept runs from collapsing that collapsed with a few dozen
LONG_WARMUP = 100
# above this rate no run of ours was of use, and above 0.3 most diverged: docs/settings.md
HIGH_RATE, USUAL_RATE = 0.1, 1e-3


@dataclass(frozen=True)
class Advice:
    """Flags for a new run, and why they may help."""

    flags: str
    why: str


def flags_of(advice: Iterable[Advice]) -> str:
    """The flags of all of them, for a sentence."""
    return f"the most promising first: {', '.join(each.flags for each in advice)}"


def lower_rate(train: TrainConfig) -> Advice:
    """A lower learning rate."""
    if train.lr > HIGH_RATE:
        facts = "of 36 runs of ours at rates up to 0.3 none diverged, at 1 eight of nine did"
        return Advice(f"--lr {USUAL_RATE:g}", f"the usual rate instead of {train.lr:g}; {facts}.")
    # one digit that counts
    rate = float(f"{train.lr / 3:.0e}")
    return Advice(f"--lr {rate:g}", f"instead of {train.lr:g}. If it fails too, divide by three again.")


def longer_warmup(train: TrainConfig) -> Iterator[Advice]:
    """A longer warm-up, if half of the run is long enough for one."""
    updates = min(max(2 * train.warmup, LONG_WARMUP), train.steps // 2)
    if updates > train.warmup:
        yield Advice(f"--warmup {updates}", f"the learning rate rises more slowly than with {train.warmup} updates.")


def against_collapse(model: GPTConfig, train: TrainConfig) -> Iterator[Advice]:
    """What keeps tokens from collapsing, the most promising first: docs/collapse.md."""
    # at such a rate every connection collapses
    if train.lr > HIGH_RATE:
        yield lower_rate(train)
    if model.head_bias != "unigram":
        yield Advice("--head-bias unigram", "the head stores the token frequencies, so that the stream need not.")
    if model.head == "tied":
        yield Advice("--head shifted", "the head then does not read a token's own embedding.")
    yield from longer_warmup(train)
    if train.lr <= HIGH_RATE:
        yield lower_rate(train)
