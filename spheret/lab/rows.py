"""One row per run that has ended: what all statistics and pages of the lab are made from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from spheret.observe.plateau import ENTROPY_MARGIN
from spheret.runs.cost import optimizer_flops, step_flops
from spheret.runs.metrics import MetricsRecord
from spheret.runs.run import Run
from spheret.support import files
from spheret.support.documents import Count, Lines, Positive, Record

# of the directory of a race or a study: its rows, and a study's run directories
RESULTS, RUNS = "results.jsonl", "runs"
TUNE, FINAL, STRESS = "tune", "final", "stress"
FINISHED = "finished"
# the training loss is the mean over this share of the steps, the last ones, and over so many at most, as in the paper
LAST_SHARE, MOST_LAST = 0.1, 200
# of one run; the paper's largest has 10^20
MOST_FLOPS = 10**30
# a loss beyond has no use, and its square may have no number
MOST_LOSS = 1e30


class Key(NamedTuple):
    """What a run of a study is: its group, its contestant, its learning rate and its seed."""

    group: str
    contestant: str
    rate: float
    seed: int


class Row(Record):
    """One run that has ended.

    state: finished; collapsed if all tokens had one direction and the loss is still at the unigram entropy;
        diverged if a guard said so.
    val_loss: at the last step; null if there is none. train_loss: the mean over the last tenth of the steps, at most
        200 of them.
    flops: of all steps, counted from the shapes. seconds: training as it took, beside whatever else ran.
    step_seconds: one update, measured side by side with the other contestants of the group; null if not measured.
    curve: steps and validation losses, until it diverged.
    unigram_entropy: the loss of knowing only token frequencies; null if the data is not known.
    """

    group: str
    contestant: str
    rate: float
    seed: Count
    state: Literal["finished", "collapsed", "diverged"]
    reason: str
    val_loss: float | None
    train_loss: float | None
    steps: Positive
    tokens: Positive
    flops: int
    seconds: float
    curve: list[tuple[Positive, float | None]]
    run: str
    commit: str | None
    torch: str | None
    processor: str | None
    threads: Positive | None
    step_seconds: float | None
    unigram_entropy: float | None

    def __post_init__(self) -> None:
        # msgspec has no bounds beyond 2^63
        if not 0 < self.flops < MOST_FLOPS:
            raise ValueError(f"flops must be above 0 and below {MOST_FLOPS:.0e}")
        losses = (self.val_loss, self.train_loss, *(loss for _, loss in self.curve))
        if not all(loss is None or abs(loss) < MOST_LOSS for loss in losses) or not 0 < self.rate < 1e100:
            raise ValueError(f"losses must lie below {MOST_LOSS:.0e}, and the rate above 0 and below 1e100")

    @property
    def key(self) -> Key:
        return Key(self.group, self.contestant, self.rate, self.seed)

    @property
    def result(self) -> tuple[str, float | None, list[tuple[int, float | None]]]:
        """What the training gave: the same settings on the same machine give the same."""
        return self.state, self.val_loss, self.curve

    @property
    def made_by(self) -> tuple[str | None, ...]:
        """What decides the last bits of a result besides its settings."""
        return self.commit, self.torch, self.processor

    @property
    def loss(self) -> float:
        """The validation loss; infinity for a run that has none."""
        return math.inf if self.val_loss is None else self.val_loss


def sound(row: Row) -> bool:
    """Whether a run gives a loss to compare."""
    return row.state == FINISHED and row.val_loss is not None


def mean_loss(rows: Collection[Row]) -> float:
    """The mean loss of some runs; infinity if one gives no loss to compare, or if there is none."""
    if not rows or not all(map(sound, rows)):
        return math.inf
    return math.fsum(row.loss for row in rows) / len(rows)


STUDY_ROWS = Lines(Row, "copy the file back, or run the study again to write it")


def read_rows(path: Path) -> dict[Key, Row]:
    """The rows of a file that `write_rows` wrote. Two rows of one run that do not agree are an error."""
    rows: dict[Key, Row] = {}
    try:
        for row, _ in STUDY_ROWS.read(path):
            if rows.setdefault(row.key, row).result != row.result:
                raise ValueError(
                    f"{path} has two results of {row.run}, seed {row.seed}, that differ: keep one of them."
                )
    except FileNotFoundError:
        raise FileNotFoundError(f"no results at {path}: give a results.jsonl of spheret study.") from None
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows in one step, in an order of their own: the same rows give the same bytes."""
    ordered = sorted(rows, key=lambda row: row.key)
    files.write_atomically(path, b"".join(STUDY_ROWS.encode(row) for row in ordered))


def last_steps(count: int) -> int:
    """Over how many of the last steps a training loss is averaged, if there are so many."""
    return min(MOST_LAST, max(1, round(LAST_SHARE * count)))


def row_of_run(run: Run, key: Key, lines: list[MetricsRecord] | None = None) -> Row | None:
    """The row of a run; None while it has not ended. lines: its metrics, if they were read before."""
    lines = run.metrics() if lines is None else lines
    if not lines or (not lines[-1].stopped and lines[-1].step < run.steps):
        return None
    last, stopped = lines[-1], lines[-1].stopped
    state, reason = _state(run, lines)
    until = next((line.step for line in lines if line.stopped or line.diverged), last.step)
    train, environment, model = run.settings.train, run.config.environment, run.model_config
    losses = [line.loss for line in lines if line.loss is not None]
    tail = losses[-last_steps(len(losses)) :]
    steps, tokens = run.steps, train.tokens_per_update
    return Row(
        **key._asdict(),
        **{name: getattr(environment, name) for name in ("commit", "torch", "processor", "threads")},
        state=state,
        reason=reason,
        val_loss=None if stopped else _usable(last.val_loss),
        train_loss=None if stopped or not tail else _usable(math.fsum(tail) / len(tail)),
        steps=steps,
        tokens=steps * tokens,
        flops=steps * (step_flops(model, tokens) + optimizer_flops(model, train.optimizer)),
        seconds=max((line.seconds for line in lines if line.seconds is not None), default=0.0),
        # what comes after a divergence is on no common scale
        curve=[(line.step, _usable(line.val_loss)) for line in lines if line.evaluated and line.step <= until],
        run=run.path.name,
        step_seconds=None,
        unigram_entropy=run.config.data.unigram_entropy,
    )


def _usable(loss: float | None) -> float | None:
    return None if loss is None or abs(loss) >= MOST_LOSS else loss


def _state(run: Run, lines: list[MetricsRecord]) -> tuple[Literal["finished", "collapsed", "diverged"], str]:
    for line in lines:
        reason = line.stopped or line.diverged
        if reason:
            return "diverged", f"step {line.step}: {reason}"
    alarms = [line for line in lines if line.alarm]
    entropy, loss = run.config.data.unigram_entropy, lines[-1].val_loss
    if alarms and entropy is not None and loss is not None and loss > (1 - ENTROPY_MARGIN) * entropy:
        return "collapsed", f"step {alarms[0].step}: {alarms[0].alarm}"
    return "finished", ""


def shortest_names(paths: Sequence[Path]) -> dict[Path, str]:
    """The shortest unique name of each path: its last part, with as many parents as are needed to tell it apart."""
    parts = {path: path.resolve().parts for path in paths}
    names = {}
    for path, own in parts.items():
        lengths = range(1, len(own) + 1)
        alone = (n for n in lengths if sum(each[-n:] == own[-n:] for each in parts.values()) == 1)
        names[path] = "/".join(own[-next(alone, len(own)) :])
    return names
