"""The chart of `spheret inspect`: every panel has a title, and below it one sentence that says what to look for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spheret.connections import SCHEMES
from spheret.observe.inspection import Inspection
from spheret.observe.records import SublayerObservation
from spheret.support.charts import Chart, Line, Panel
from spheret.support.line_styles import scheme_styles

Series = tuple[Sequence[float], Sequence[float | None]]


class Quantity(NamedTuple):
    """A column of the table and a panel: title, vertical axis, what to look for, and whether it is logarithmic."""

    column: str
    title: str
    axis: str
    look_for: str
    log: bool = False


# by their key in a sublayer's record
QUANTITIES = {
    "norm": Quantity(
        "|h|", "How long the stream's vectors are", "|h|",
        "growth over depth, which makes late sublayers count for less, as in Pre-LN. On the sphere it is flat.", True,
    ),
    "massive": Quantity(
        "max/median", "Largest activation over the median one", "max / median",
        "values in the hundreds: a few massive activations then carry the stream.", True,
    ),
    "sink": Quantity(
        "sink", "How much attention the first token gets", "share of attention",
        "values near 1: these heads rest on the first token and read little else.",
    ),
    "angle_mean": Quantity(
        "angle", "How far each sublayer turns the stream", "angle (radians)",
        "late sublayers near 0, which change little, and single ones that turn far more than the others.",
    ),
    "update_cosine": Quantity(
        "cos updates", "Does an update continue the last one?", "cosine",
        "0 is a new direction. Near 1 a sublayer repeats the one before, below 0 it undoes it.",
    ),
    "cosine": Quantity(
        "cos tokens", "Are the tokens still different?", "mean cosine between tokens",
        "a rise to 1: there the states of all tokens have collapsed into one.",
    ),
    "effective_rank": Quantity(
        "rank", "How many directions the tokens use", "effective rank", "a fall towards 1, which is collapse too.",
    ),
    "removal": Quantity(
        "loss rise", "How much the loss needs each sublayer", "rise of the loss without it (nats)",
        "sublayers near 0, which the model does not need, and single ones on which all depends.",
    ),
    "grad_norm": Quantity(
        "|gradient|", "How strongly each sublayer learns", "gradient norm",
        "a slope over depth: one end of the model then learns faster than the other.", True,
    ),
}  # fmt: skip
DISTANCE = Quantity(
    "distance", "How far each state is from the last one", "angle / pi",
    "a flat end: the last sublayers change little of what the head reads.",
)  # fmt: skip


def inspect_chart(models: Mapping[str, Inspection]) -> Chart:
    """One panel per quantity with one line per model. Panels without a number are left out.

    models: what was seen, by the name that a line is given.
    """
    styles = scheme_styles({name: each.scheme for name, each in models.items()}, SCHEMES)
    panels: list[tuple[Quantity, str, Mapping[str, Series]]] = [
        (quantity, "sublayer", {name: _of_sublayers(each.sublayers, key) for name, each in models.items()})
        for key, quantity in QUANTITIES.items()
    ]
    last = {name: [row[-1] for row in each.angular_distance] for name, each in models.items()}
    distances = {name: (range(len(values)), values) for name, values in last.items()}
    panels.append((DISTANCE, "sublayers so far", distances))
    title = f"Inside {' and '.join(models)}, sublayer by sublayer"
    shown = [
        Panel(
            [Line(name, x, [float("nan") if v is None else v for v in y], styles[name], mark="o")
             for name, (x, y) in series.items()],
            axis, quantity.axis, quantity.title, f"Look for: {quantity.look_for}", quantity.log,
        )
        for quantity, axis, series in panels
        if any(value is not None for _, y in series.values() for value in y)
    ]  # fmt: skip
    return Chart("inspect", title, shown, title)


def _of_sublayers(sublayers: Sequence[SublayerObservation], key: str) -> Series:
    measured = [(each.sublayer, getattr(each, key)) for each in sublayers]
    return [number for number, value in measured if value is not None], [v for _, v in measured if v is not None]
