"""Write the table and the figure of docs/convert-command.md, from what `spheret convert` has measured.

    python benchmarks/convert_results.py

benchmarks/convert/ has the convert.json of each model, seed and number of steps, named SHAPE-SEED-STEPS.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from spheret.conversion.command.convert_json import CONVERSIONS, ConvertRecord
from spheret.support.figure_style import INK, PALETTE, WIDTH, axes_grid, legend_below, own_style, render

ROOT = Path(__file__).parent.parent
FOLDER, FIGURE = ROOT / "benchmarks" / "convert", ROOT / "docs" / "figures" / "convert.svg"
PAGE = ROOT / "docs" / "convert-command.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->"
Records = dict[tuple[str, int], list[ConvertRecord]]


def read(folder: Path) -> Records:
    """The records by shape and steps, the seeds in order."""
    found: Records = {}
    for path in sorted(folder.glob("*.json")):
        shape, _, steps = path.stem.split("-")
        found.setdefault((shape, int(steps)), []).append(CONVERSIONS.read(path))
    return dict(sorted(found.items()))


def _cell(values: Sequence[float | None], sign: str = "") -> str:
    numbers = [value for value in values if value is not None]
    mean = format(statistics.mean(numbers), f"{sign}.3f")
    return mean if len(numbers) == 1 else f"{mean} \u00b1 {statistics.stdev(numbers):.3f}"


def table(records: Records) -> str:
    """Means and standard deviations over the seeds."""
    head = (
        "model",
        "steps",
        "seeds",
        "original",
        "exact",
        "calibrated",
        "plain",
        "control",
        "converted",
        "difference",
    )
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for (shape, steps), group in records.items():
        starts = [
            [getattr(each.starts, name) for each in group] for name in ("original", "exact", "calibrated", "plain")
        ]
        control, converted = ([each.control.last for each in group], [each.converted.last for each in group])
        gaps = [b - a for a, b in zip(control, converted, strict=True) if a is not None and b is not None]
        cells = [_cell(values) for values in (*starts, control, converted)] + [_cell(gaps, "+")]
        lines.append("| " + " | ".join([shape, str(steps), str(len(group)), *cells]) + " |")
    return "\n".join(lines)


def figure(records: Records, path: Path) -> None:
    """One panel per row of the table, one pair of lines per seed."""
    with own_style():
        rows = -(-len(records) // 2)
        drawn, grid = axes_grid(rows, 2, (WIDTH, 2.7 * rows))
        for axes, ((shape, steps), group) in zip(grid.flat, records.items(), strict=False):
            for number, record in enumerate(group):
                arms = (("control", record.control, PALETTE[6][0]), ("converted", record.converted, PALETTE[0][0]))
                for name, arm, colour in arms:
                    points = [(each.step, each.loss) for each in arm.evaluations if each.loss is not None]
                    label = name if number == 0 else None
                    axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, label=label)
            axes.axvline(group[0].settings.anneal, color=INK, linewidth=0.8, linestyle=(0, (1.5, 1.5)), label="t = 1")
            axes.set_title(f"{shape}, {steps} steps")
            axes.set_xlabel("step")
            axes.set_ylabel("validation loss")
        legend_below(drawn, *grid.flat[0].get_legend_handles_labels())
        caption = "Validation loss while converted models and their controls are fine-tuned."
        path.write_text(render("convert", caption, drawn).themed_svg)


def page(text: str, records: Records) -> str:
    """The text of the page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table(records) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    records = read(FOLDER)
    PAGE.write_text(page(PAGE.read_text(), records))
    figure(records, FIGURE)


if __name__ == "__main__":
    main()
