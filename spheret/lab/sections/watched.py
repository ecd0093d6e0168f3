"""A watched training: what was seen first, then the inside of the model, then what was left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spheret.lab.page.section import Section, Table, TableCell
from spheret.lab.sections.charts import later_range
from spheret.lab.watch_file import Watched
from spheret.lab.words import listed
from spheret.observe.records import Event
from spheret.support.charts import DASHES, PALETTE, Chart, Line, Mark, Panel, Style

# so many events are marked on a curve, and so many sublayers are shown over time
MOST_MARKS, MOST_LINES = 30, 6
# so many alarms stand on the first screen, and so many events in the table
FIRST, MOST_EVENTS = 3, 100
# nobody can see more points on one line
MOST_POINTS = 600
# a table of more rows is closed at first
MANY = 12
# numbers of the palette
COLOURS = {"alarm": 1, "warning": 7}
# colour and dashes of the last watched step, of one half-way and of the first
STYLES = ((PALETTE[0][0], "-"), (PALETTE[3][0], DASHES[1]), (PALETTE[7][0], DASHES[3]))


@dataclass(frozen=True)
class Measure:
    """What is measured per sublayer.

    name: in the table. ends: of its axis, if it is a share or a cosine. log: its scale. absent: why it may lack.
    """

    key: str
    name: str
    caption: str = ""
    unit: str = "no unit"
    ends: tuple[float, float] | None = None
    log: bool = False
    absent: str = "the residual stream was not found"


SHARE = (0, 1)
# in the order of the page: what the forward pass shows, then gradients and updates
STREAM = (
    Measure("norm", "norm", "Mean norm of the stream behind each sublayer", log=True),
    Measure("angle_mean", "angle", "Mean angle by which each sublayer turns the stream", "radians"),
    Measure("cosine", "token cosine", "Mean cosine between different tokens. At 1 all are alike", ends=SHARE),
    Measure("common_stream", "common in stream", "Share of the common direction in the stream", ends=SHARE),
    Measure("common_output", "common in output", "Share of the common direction in the branch's output", ends=SHARE),
    Measure("massive", "massive", "Largest activation over the median one", log=True),
    Measure("sink", "sink", "Mean attention to the first token", ends=SHARE, absent="no attention is returned"),
)
UPDATES = (
    Measure("grad_norm", "gradient norm", "Gradient norm of the weights", log=True, absent="there was no gradient"),
    Measure("update", "update", "Norm of the last update over the weights' norm", log=True, absent="no step yet"),
)
# shown only in the table
OTHERS = (
    Measure("growth", "growth"),
    Measure("angle_max", "largest angle"),
    Measure("moved", "moved"),
    Measure("alpha", "alpha", absent="the connections have no step size"),
)


def headline(watched: Watched) -> str:
    """Whether anything went wrong so far; if so, what, when and where."""
    alarms = watched.alarms
    if not watched.observations:
        return "No step was watched yet."
    if not alarms:
        warnings = len(watched.events)
        return f"No alarm by step {watched.step:,}" + (f", {_count(warnings, 'warning')}." if warnings else ".")
    first = alarms[0]
    opening = f"{_count(len(alarms), 'alarm')} by step {watched.step:,}"
    return f"{opening}: {_event(first)}." if len(alarms) == 1 else f"{opening}, the first: {_event(first)}."


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def _event(event: Event) -> str:
    return f"{event.kind} at step {event.step:,} in {event.where}"


def watched_sections(watched: Watched, opening: bool = True) -> list[Section]:
    """All sections of one watched training. opening: whether the first is the first screen of the page."""
    sections = [
        Section("watched", "What was seen", _first_words(watched), charts=loss_chart(watched), opening=opening),
        _events_section(watched),
        _charts_section("gradient", "Gradient norm", _gradient_chart(watched)),
        _charts_section("inside", "Inside the model", _inside(watched, STREAM)),
        _charts_section("updates", "Gradients and updates", _inside(watched, UPDATES)),
        _table_section(watched),
        _provenance(watched),
    ]
    return [section for section in sections if section is not None]


def _helps(event: Event) -> str:
    return f" What helps: {event.remedy}." if event.remedy else ""


def _first_words(watched: Watched) -> list[str]:
    events = watched.alarms[:FIRST]
    words = [f"Step {each.step:,}, {each.where}: {each.sentence}.{_helps(each)}" for each in events]
    left = len(watched.alarms) - len(events)
    header = watched.header
    told = f"{header.model}, {header.parameters:,} parameters, watched every {header.every:,} steps."
    return [headline(watched), *words, *([f"The table below lists {left} more."] if left else []), told]


def _events_section(watched: Watched) -> Section | None:
    if not watched.events:
        return None
    texts = [
        (f"{event.step:,}", event.kind, event.level, event.where, event.sentence or "-", event.remedy or "-")
        for event in watched.events[:MOST_EVENTS]
    ]
    rows = [list(map(TableCell, words)) for words in texts]
    left = len(watched.events) - len(rows)
    notes = [f"{left:,} later ones are left out; {watched.name} has them all."] if left else []
    columns = ["step", "what", "level", "where", "what was seen", "what helps"]
    table = Table("events", "Alarms and warnings, the first ones first", columns, rows, notes)
    return Section("events", "Alarms and warnings", tables=[table])


def _charts_section(name: str, title: str, charts: list[Chart]) -> Section | None:
    return Section(name, title, charts=charts) if charts else None


def _inside(watched: Watched, measures: Sequence[Measure]) -> list[Chart]:
    return [chart for measure in _measured(watched, measures) for chart in measure_charts(watched, measure)]


def _cell(value: float | None, source: str) -> TableCell:
    return TableCell("-") if value is None or not math.isfinite(value) else TableCell(f"{value:.4g}", value, source)


def _table_section(watched: Watched) -> Section | None:
    last, header = watched.last, watched.header
    if last is None:
        return None
    measures = _measured(watched, (*STREAM, *OTHERS, *UPDATES))
    found = header.sublayers
    kind, caption = ("sublayers", "Sublayers") if found else ("places", "Layers")
    rows = []
    for place, name in enumerate(watched.parts):
        number = found[place].sublayer if found else place + 1
        cells = [TableCell(name), TableCell(str(number), float(number))]
        cells += [TableCell(found[place].branch or "-")] if found else []
        where = f"{watched.name}[{last.step}].{kind}[{number}]"
        cells += [_cell(float(watched.measures[each.key][place, -1]), f"{where}.{each.key}") for each in measures]
        rows.append(cells)
    columns = ["name", "number", *(["branch"] if found else []), *(measure.name for measure in measures)]
    table = Table(
        kind, f"{caption} at step {last.step:,}", columns, rows, folded=len(rows) > MANY
    ).without_empty_columns
    tables = [table] if rows else []
    if found and last.places:
        columns = ["name", "gradient norm", "update"]
        where = f"{watched.name}[{last.step}].places"
        outside = [
            [
                TableCell(place.name),
                *(_cell(getattr(place, key), f"{where}[{place.name}].{key}") for key in ("grad_norm", "update")),
            ]
            for place in last.places
        ]
        tables.append(Table("places", "Weights outside of the sublayers", columns, outside))
    return Section("table", "Every sublayer" if found else "Every layer", tables=tables)


def _provenance(watched: Watched) -> Section:
    """What was watched, and what was not measured and why."""
    header, observations = watched.header, watched.observations
    found = {
        "connections": f"{_count(len(header.sublayers), 'sublayer')} of spheret's connections.",
        "residual sums": f"{_count(len(header.sublayers), 'sublayer')}, found by the sums that the code of the model "
        "adds to its residual stream.",
        "parameters only": "The residual stream was not found, so that only losses, gradients and updates were seen.",
    }[header.found]
    words = [found, header.note]
    if observations:
        words.append(f"{_count(len(observations), 'step')} watched, the last is step {watched.step:,}.")
        words.append(_remarks(watched))
    if watched.last is not None and header.sublayers:
        every, missing = (*STREAM, *OTHERS, *UPDATES), dict[str, list[str]]()
        present = _measured(watched, every)
        for measure in (each for each in every if each not in present):
            missing.setdefault(measure.absent, []).append(measure.name)
        words += [f"Not measured, because {why}: {listed(names, len(names))}." for why, names in missing.items()]
    return Section("provenance-watched", "What was measured", [text for text in words if text])


def _remarks(watched: Watched) -> str:
    """Scalars on a bound, and the logit of the current token at the start."""
    last, texts = watched.observations[-1], []
    own = [each.own_logit for each in watched.observations if each.own_logit is not None]
    if last.on_bound:
        texts.append(f"On their bounds: {listed(last.on_bound)}.")
    if own:
        texts.append(f"At the start the logit of the current token was {own[0]:.3g} above the mean logit.")
    return " ".join(texts)


def loss_chart(watched: Watched) -> list[Chart]:
    """The loss by step; no chart before the first."""
    return _curve("loss", "Loss by step, with the alarms and warnings", watched, watched.losses, "loss")


def _gradient_chart(watched: Watched) -> list[Chart]:
    caption = "Norm of the whole gradient at watched steps"
    return _curve("gradient", caption, watched, watched.norms, "gradient norm", log=True)


def _marks(watched: Watched) -> list[Mark]:
    """The first events, one per step, level and kind, alarms before warnings."""
    seen = {(event.step, event.level, event.kind) for event in watched.events}
    return [Mark(step, kind, COLOURS[level]) for step, level, kind in sorted(seen)[:MOST_MARKS]]


def _curve(
    name: str, caption: str, watched: Watched, points: tuple[np.ndarray, np.ndarray], y: str, log: bool = False
) -> list[Chart]:
    """One line. Many points become the means of a few each, with the range of these: a spike stays visible."""
    steps, values = points
    if log:
        steps, values = steps[values > 0], values[values > 0]
    if not len(steps):
        return []
    every = -(-len(steps) // MOST_POINTS)
    starts = np.arange(0, len(steps), every)
    places = [int(step) for step in steps[np.append(starts[1:], len(steps)) - 1]]
    means = np.add.reduceat(values, starts) / np.diff(starts, append=len(steps))
    low, high = (end.reduceat(values, starts).tolist() if every > 1 else () for end in (np.minimum, np.maximum))
    line = Line(y, places, means.tolist(), STYLES[0], low, high)
    # spikes of single steps do not set the scale
    limits = None if log else later_range([Line(y, places, line.y, STYLES[0])])
    # a loss that is not finite has no place, and its alarm stands where the line ends
    inside = [Mark(min(max(mark.x, places[0]), places[-1]), mark.text, mark.colour) for mark in _marks(watched)]
    words = f"{y}, mean and range of {every} steps" if every > 1 else y
    return [Chart(name, caption, [Panel([line], "step", words, log=log, limits=limits, marks=inside)], window=1)]


def _measured(watched: Watched, measures: Sequence[Measure]) -> list[Measure]:
    """Those of the measures that have a number at some watched step."""
    return [each for each in measures if np.isfinite(watched.measures.get(each.key, np.nan)).any()]


def measure_charts(watched: Watched, measure: Measure) -> list[Chart]:
    """A measure by sublayer at the last watched step, at one half-way and at the first; some sublayers by step."""
    values, steps = watched.measures[measure.key], [observation.step for observation in watched.shown]
    what = "sublayer" if watched.header.sublayers else "place, as numbered in the table"
    stem, y = measure.key.replace("_", "-"), f"{measure.name} ({measure.unit})"
    limits = _ends(measure, values)
    columns = dict.fromkeys((len(steps) - 1, len(steps) // 2, 0))
    places = range(1, len(values) + 1)
    depth = [
        line
        for column, style in zip(columns, STYLES, strict=False)
        for line in _line(measure, f"step {steps[column]:,}", places, values[:, column], style)
    ]
    rows = sorted({round(place) for place in np.linspace(0, len(values) - 1, min(MOST_LINES, len(values)))})
    time = [
        line
        for number, row in enumerate(rows)
        for line in _line(measure, watched.parts[row], steps, values[row], (PALETTE[number][0], DASHES[number]))
    ]
    found = [Chart(f"{stem}-depth", measure.caption, [Panel(depth, what, y, log=measure.log, limits=limits)])]
    if len(steps) > 1:
        panel = Panel(time, "step", y, log=measure.log, limits=limits, marks=_marks(watched))
        found.append(Chart(f"{stem}-time", f"{measure.caption}, over time", [panel]))
    return [chart for chart in found if chart.panels[0].lines]


def _line(measure: Measure, label: str, places: Sequence[int], values: np.ndarray, style: Style) -> list[Line]:
    """A line through the values that can be shown, if there are any."""
    keep = np.isfinite(values) & ((values > 0) | (not measure.log))
    shown = [place for place, known in zip(places, keep, strict=True) if known]
    return [Line(label, shown, values[keep].tolist(), style)] if shown else []


def _ends(measure: Measure, values: np.ndarray) -> tuple[float, float] | None:
    """The ends of an axis: the measure's own, or from 0 on. A cosine may lie below."""
    if measure.log:
        return None
    low, high = measure.ends or (0.0, 1.05 * max(0.05, float(np.nanmax(values))))
    return min(low, math.floor(10 * float(np.nanmin(values))) / 10), high
