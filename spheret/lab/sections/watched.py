"""The sections of a watched training: what was seen first, then the inside of the model, then what was left out."""

from __future__ import annotations

import math

from spheret.lab.figures.watched import OTHERS, STREAM, UPDATES, curves, figure_names, measured
from spheret.lab.page.tables import Table, TableCell
from spheret.lab.sections.section import Section
from spheret.lab.watch_file import Watched
from spheret.lab.words import listed
from spheret.watching.observations import Event

# so many alarms stand on the first screen, and so many events in the table
FIRST, MOST = 3, 100
# a table of more rows is closed at first
MANY = 12


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
        Section("watched", "What was seen", _first_words(watched), figures=["loss"], opening=opening),
        _events_section(watched),
        Section("gradient", "Gradient norm", figures=["gradient"]) if "gradient" in curves(watched) else None,
        _inside_section(watched, "inside", "Inside the model", figure_names(watched, STREAM)),
        _inside_section(watched, "updates", "Gradients and updates", figure_names(watched, UPDATES)),
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
    rows = [
        [
            TableCell(f"{event.step:,}"),
            TableCell(event.kind),
            TableCell(event.level),
            TableCell(event.where),
            TableCell(event.sentence or "-"),
            TableCell(event.remedy or "-"),
        ]
        for event in watched.events[:MOST]
    ]
    left = len(watched.events) - len(rows)
    notes = [f"{left:,} later ones are left out; {watched.name} has them all."] if left else []
    columns = ["step", "what", "level", "where", "what was seen", "what helps"]
    table = Table("events", "Alarms and warnings, the first ones first", columns, rows, notes)
    return Section("events", "Alarms and warnings", tables=[table])


def _inside_section(watched: Watched, name: str, title: str, figures: list[str]) -> Section | None:
    rings = any(event.sublayer is not None for event in watched.events)
    words = "A ring marks a sublayer and a step that an alarm or a warning names." if rings else ""
    return Section(name, title, [words] if words else [], figures=figures) if figures else None


def _cell(value: float | None, source: str) -> TableCell:
    return TableCell("-") if value is None or not math.isfinite(value) else TableCell(f"{value:.4g}", value, source)


def _table_section(watched: Watched) -> Section | None:
    last, header = watched.last, watched.header
    if last is None:
        return None
    measures = measured(watched, (*STREAM, *OTHERS, *UPDATES))
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
        present = measured(watched, every)
        for measure in (each for each in every if each not in present):
            missing.setdefault(measure.absent, []).append(measure.name)
        words += [f"Not measured, because {why}: {listed(names, len(names))}." for why, names in missing.items()]
    return Section("provenance-watched", "What was measured", [text for text in words if text])


def _remarks(watched: Watched) -> str:
    """Skipped updates, scalars on a bound, and the logit of the current token at the start."""
    last, own = (
        watched.observations[-1],
        [each.own_logit for each in watched.observations if each.own_logit is not None],
    )
    texts = (
        [f"{_count(last.skipped, 'update')} {'was' if last.skipped == 1 else 'were'} skipped."]
        if last.skipped
        else []
    )
    if last.on_bound:
        texts.append(f"On their bounds: {listed(last.on_bound)}.")
    if own:
        texts.append(f"At the start the logit of the current token was {own[0]:.3g} above the mean logit.")
    return " ".join(texts)
