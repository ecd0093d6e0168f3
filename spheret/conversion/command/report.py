"""The report of a conversion: the losses, their curves, and the step size of each residual."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spheret.conversion.command.convert_json import ConvertRecord
from spheret.lab.page.output import contents, write_files
from spheret.lab.page.tables import Table, TableCell
from spheret.lab.sections.section import Section
from spheret.support.documents import Number
from spheret.support.figure_style import INK, PALETTE, Drawing, axes_grid, legend_below, own_style, render

FOLDER = "report"
_CONVERTED, _CONTROL = PALETTE[0][0], PALETTE[6][0]


def write_report(record: ConvertRecord, directory: Path) -> Path:
    """Write the page, the tables and the figures. Returns the path of the page."""
    out = directory / FOLDER
    title = f"{Path(record.settings.model).name} converted to {record.settings.scheme}"
    return write_files(out, contents(title, _sections(record), _drawings(record)))


def outcome(record: ConvertRecord) -> str:
    """What was measured, as a few lines for a terminal."""
    starts = record.starts
    lines = [
        f"{record.architecture}, {len(record.sublayers)} residuals to {record.settings.scheme}, validation loss in "
        "nats per token",
        f"  original    {_text(starts.original)}",
        f"  exact       {_text(starts.exact)}   right after the conversion",
        f"  calibrated  {_text(starts.calibrated)}",
        f"  plain       {_text(starts.plain)}",
        f"  control     {_text(record.control.last)}   after {record.settings.steps:,} steps",
        f"  converted   {_text(record.converted.last)}   {_above(record)}",
    ]
    return "\n".join(lines)


def _text(loss: Number) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _gap(record: ConvertRecord) -> Number:
    control, converted = record.control.last, record.converted.last
    return None if control is None or converted is None else converted - control


def _above(record: ConvertRecord) -> str:
    gap = _gap(record)
    if gap is None:
        return "a loss is not finite"
    return f"{abs(gap):.4f} {'above' if gap >= 0 else 'below'} the control"


def _cell(value: Number, digits: int = 4) -> TableCell:
    return TableCell("-" if value is None else f"{value:.{digits}f}", value, "convert.json")


def _sections(record: ConvertRecord) -> list[Section]:
    settings = record.settings
    moved = (
        f"Over the first {settings.anneal:,} of them t moves from 0 to 1: the step sizes move from each token's own "
        "to one learned number per sublayer, and the length of the stream leaves the model."
        if settings.anneal
        else f"The start is {settings.start}, so there is nothing to anneal: t is 1 from the beginning."
    )
    paragraphs = [
        f"{settings.model} is a {record.architecture} with {record.parameters:,} parameters. Its "
        f"{len(record.sublayers)} residual sums were converted to steps of {settings.scheme} on a sphere, which adds "
        f"{record.added_parameters} parameters.",
        f"Then it was fine-tuned on {settings.data} for {settings.steps:,} steps of {settings.batch_size} x "
        f"{settings.block} tokens. {moved}",
        "The control is the original, fine-tuned on the same batches with the same settings. "
        f"The converted model ends {_above(record)}.",
    ]
    starts = record.starts
    rows = [
        ("original", starts.original, "before the conversion"),
        ("exact start", starts.exact, "right after it; t = 0"),
        ("calibrated start", starts.calibrated, "radius and step sizes fitted to the original, no training; t = 1"),
        ("plain start", starts.plain, "the scheme's own step sizes, no training; t = 1"),
        ("control", record.control.last, f"the original after {settings.steps:,} steps"),
        (
            "converted",
            record.converted.last,
            f"from the {settings.start} start, after {settings.steps:,} steps; t = 1",
        ),
        ("converted - control", _gap(record), "above 0: the conversion costs that much"),
    ]
    losses = Table(
        "losses",
        "Validation loss",
        ["model", "loss", "meaning"],
        [[TableCell(name), _cell(loss), TableCell(meaning)] for name, loss, meaning in rows],
        [
            f"Losses are in nats per token: the mean of {settings.eval_windows} windows of {settings.block} tokens, "
            "the same for every model.",
            f"One seed ({settings.seed}). Another order of the batches would change both fine-tunings.",
        ],
    )
    return [
        Section("losses", "What it costs", paragraphs, [losses], ["losses"]),
        Section("step-sizes", "Step sizes", (), [_sublayers(record)], ["step-sizes"], folded=True),
    ]


def _sublayers(record: ConvertRecord) -> Table:
    rows = []
    for row in record.sublayers:
        shares = [count / max(row.rows, 1) for count in (row.beyond_half_turn, row.beyond_reach)]
        rows.append(
            [
                TableCell(f"{row.stack} {row.sublayer}".strip()),
                TableCell(row.name),
                TableCell(row.kind),
                _cell(row.mean_angle, 3),
                *(TableCell(f"{share:.2%}", share, "convert.json") for share in shares),
                *(_cell(value) for value in (row.alpha, row.alpha_after, row.radius, row.radius_after)),
            ]
        )
    return Table(
        "step-sizes",
        "Every residual",
        ["sublayer", "end of the branch", "kind", "angle", "beyond pi/2", "beyond reach", "alpha before",
         "alpha after", "radius before", "radius after"],
        rows,
        [
            "Angle is the mean turn of a token in the original, in radians. Beyond pi/2 are tokens that turn further "
            "than that, beyond reach those that turn further than the scheme's retraction can.",
            *(f"Left as it was: {name}: {why}." for name, why in record.left),
        ],
    )  # fmt: skip


def _drawings(record: ConvertRecord) -> list[Drawing]:
    with own_style():
        return [_losses(record), _step_sizes(record)]


def _line(axes: Any, points: Sequence[tuple[float, float]], label: str, colour: str) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker="o", markersize=3, label=label)


def _losses(record: ConvertRecord) -> Drawing:
    figure, grid = axes_grid(2, 1, sharex=True, height_ratios=(4, 1))
    (top,), (bottom,) = grid
    for name, arm, colour in (
        ("control", record.control, _CONTROL),
        ("converted", record.converted, _CONVERTED),
    ):
        points = [(each.step, each.loss) for each in arm.evaluations if each.loss is not None]
        _line(top, points, name, colour)
    if record.starts.original is not None:
        top.axhline(record.starts.original, color=INK, linewidth=1, linestyle=(0, (1.5, 1.5)), label="original")
    top.set_ylabel("validation loss")
    legend_below(figure, *top.get_legend_handles_labels())
    moved = [(each.step, each.t) for each in record.converted.evaluations if each.t is not None]
    bottom.plot([step for step, _ in moved], [t for _, t in moved], color=_CONVERTED)
    bottom.set_ylim(-0.05, 1.05)
    bottom.set_ylabel("t")
    bottom.set_xlabel("step")
    caption = (
        "Validation loss of the converted model and of the control by step, and the position t of the annealing."
    )
    return render("losses", caption, figure)


def _step_sizes(record: ConvertRecord) -> Drawing:
    figure, grid = axes_grid()
    axes = grid[0][0]
    numbers = range(1, len(record.sublayers) + 1)
    for label, key, colour in (("before", "alpha", _CONTROL), ("after", "alpha_after", _CONVERTED)):
        points = [(x, getattr(row, key)) for x, row in zip(numbers, record.sublayers, strict=True)]
        points = [point for point in points if point[1]]
        _line(axes, points, label, colour)
    axes.set_yscale("log")
    axes.set_xlabel("residual")
    axes.set_ylabel("step size")
    legend_below(figure, *axes.get_legend_handles_labels())
    return render("step-sizes", "The learned step size of each residual before and after the fine-tuning.", figure)
