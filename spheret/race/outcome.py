"""What a race has shown, for the terminal: the contestants, best first, and what follows from that."""

from __future__ import annotations

from collections.abc import Sequence

from spheret.report.results import Result, RunGroup
from spheret.report.sections import format_loss, number_cell, rate_cell
from spheret.report.verdicts import Comparison, comparisons
from spheret.support.tables import print_whole

COLUMNS = ("", "contestant", "lr", "val loss", "behind the best", "95% interval", "ms per step")
NEXT = "`spheret study PLAN.toml` tunes every rate, adds seeds and gives verdicts (docs/lab.md)"


def _loss(runs: Sequence[Result]) -> float | None:
    """The mean final loss of a contestant; None if a run of it diverged or is not finished."""
    if any(run.diverged is not None or not run.finished or run.val_loss is None for run in runs):
        return None
    return number_cell([run.val_loss for run in runs], format_loss).value


def ranking(group: RunGroup) -> list[str]:
    """The contestants, the lowest loss first, and those without a loss last."""
    losses = {label: _loss(runs) for label, runs in group.contestants.items()}
    return sorted(losses, key=lambda label: (losses[label] is None, losses[label] or 0.0))


def _behind(label: str, best: str, compared: Sequence[Comparison]) -> tuple[str, str]:
    """How much higher the loss of a contestant is than that of the best, and the interval."""
    for comparison in compared:
        interval = comparison.interval
        if {comparison.first, comparison.second} == {label, best} and interval is not None:
            sign = 1 if comparison.first == label else -1
            low, high = sorted((sign * interval.low, sign * interval.high))
            return f"{sign * interval.estimate:+.4f}", f"{low:+.4f} to {high:+.4f}"
    return "-", "-"


def rows(group: RunGroup, compared: Sequence[Comparison]) -> list[list[str]]:
    """One row of COLUMNS per contestant."""
    order = ranking(group)
    table = []
    for rank, label in enumerate(order, start=1):
        runs = group.contestants[label]
        diverged = any(run.diverged is not None for run in runs)
        missing = "diverged" if diverged else "-"
        rate = rate_cell(group.bowls[label]).text if group.bowls else f"{runs[0].run.settings.train.lr:g}"
        loss = number_cell([] if diverged else [run.val_loss for run in runs], format_loss, missing).text
        cost = number_cell([runs[0].milliseconds_per_step], lambda x: f"{x:.1f}").text if group.side_by_side else "-"
        table.append([str(rank), label, rate, loss, *_behind(label, order[0], compared), cost])
    return table


def conclusion(group: RunGroup, compared: Sequence[Comparison]) -> str:
    """One sentence: what can and cannot be concluded, and what to run next."""
    best = ranking(group)[0]
    if _loss(group.contestants[best]) is None:
        return "No contestant finished with a finite loss, so nothing can be concluded: take lower rates with --lr."
    if not compared:
        return f"There is one contestant, so nothing is compared: give more --schemes; {NEXT}."
    if group.one_seed:
        return (
            f"One seed shows a collapse, a divergence or a large gap, and cannot tell which of two close losses is "
            f"lower: no pair has a winner; repeat with --seeds 5, or {NEXT}."
        )
    edges = group.edge_contestants
    untuned = f", and the best rate of {', '.join(edges)} may lie beyond those tried" if edges else ""
    beaten = [each for each in compared if each.verdict == f"{best} is better"]
    decided = sum(each.verdict.endswith(" is better") for each in compared)
    if len(beaten) == len(group.contestants) - 1:
        answer = f"{best} is better than every other contestant on these seeds, this data and this size alone"
    elif decided:
        answer = f"{decided} of {len(compared)} pairs have a winner, and {best} has not beaten all others"
    else:
        answer = f"No pair has a winner on {len(group.seeds)} seeds, which does not mean that they are equal"
    return f"{answer}{untuned}; {NEXT}."


def print_outcome(groups: Sequence[RunGroup]) -> None:
    """Print the table and the sentence of a race, whose runs all have the same data and so are one group."""
    from rich.console import Console
    from rich.table import Table

    for group in groups:
        compared = comparisons(group)
        table = Table()
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "contestant" else "right", no_wrap=True)
        for row in rows(group, compared):
            table.add_row(*row)
        console = Console()
        print_whole(console, table)
        console.print(conclusion(group, compared), highlight=False, soft_wrap=True, markup=False)
