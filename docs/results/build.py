"""Write all that follows from the results in docs/results: figures, tables, and the marked parts of pages.

`make results` runs it. A marked part begins with a comment such as `<!-- sentence nine -->` or `<!-- table
losses-nine -->` and ends with `<!-- end -->`. What stands between them is written by this script.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path

import collapse
import collapse_tables
import inside
from claims import NORMED, POST, PRE, PROJ, Studies, claims_table, number, where

from spheret.connections import SCHEMES
from spheret.lab.answers import GroupAnswer
from spheret.lab.endpoints import (
    ALPHA,
    EndpointAnswer,
    PairedComparison,
    comparison,
    differences,
    ladder_of,
)
from spheret.lab.entries import Entry
from spheret.lab.ngrams import read_ngrams
from spheret.lab.page.section import to_markdown
from spheret.lab.plan import OURS, PLANS, read_plan
from spheret.lab.report import sections_of, study_findings
from spheret.lab.rows import Key, Row, read_rows, sound
from spheret.lab.statistics import over_seeds
from spheret.lab.words import SHORT, answer_sentence, limits, listed, p_words
from spheret.paper.numbers import CORPORA, LOSSES, ROWS, SIZES
from spheret.support.charts import DASHES, MUTED, Chart, Line, Panel, draw, scheme_styles

HERE = Path(__file__).parent
# the plan of every study, by the name of its results
STUDIES = {
    "results": OURS,
    **{name: PLANS[name] for name in ("depth", "modern", "streams", "length", "length-deep", "family", "defaults")},
}
# what the page of all its tables calls a study
TITLES = {
    "results": "the study",
    "depth": "the depth study",
    "modern": "the modern backbone",
    "streams": "the streams",
    "length": "the lead by length",
    "length-deep": "the lead by length at 36 layers",
    "family": "the family",
    "defaults": "the default rates",
}
PAGES = (
    HERE / "README.md",
    HERE / "tied.md",
    HERE / "length.md",
    HERE / "defaults.md",
    HERE / "depth.md",
    HERE / "modern.md",
    HERE / "streams.md",
    HERE / "collapse.md",
    HERE.parent / "collapse.md",
    HERE.parent / "technical-report.md",
    HERE.parent / "which-connection.md",
    HERE.parent / "findings.md",
    HERE.parents[1] / "README.md",
)
MARKED = re.compile(r"(?P<begin><!-- (?P<kind>\w+) (?P<name>[\w.-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


INSIDE = "Six measures of every sublayer, for Pre-LN and the projection"
# what a figure shows, by the end of its name
SHOWN = {
    "answer": "loss of each contestant at its own best learning rate",
    "bowls": "loss by learning rate, one panel per contestant",
    "ladder": "difference to the reference by size",
    "lead": "loss by tokens beside n-gram models, and the difference to Pre-LN",
}


# where the default learning rates come from: the first of them that tried a contestant at three rates or more
RATES_FROM = ("depth", "length", "streams", "defaults")
RATES = HERE.parents[1] / "spheret" / "train" / "rates.toml"
STEP = HERE.parents[1] / "benchmarks" / "step.json"


def default_rates() -> dict[str, tuple[float, str]]:
    """The best learning rate of every contestant at 12 layers of width 64, and the plan that found it."""
    found: dict[str, tuple[float, str]] = {}
    for plan in RATES_FROM:
        if not (HERE / f"{plan}.jsonl").exists():
            continue
        losses: dict[str, dict[float, float]] = {}
        for row in read_rows(HERE / f"{plan}.jsonl").values():
            if row.group == plan and row.steps == 300 and row.seed == 1 and sound(row):
                losses.setdefault(row.contestant, {})[row.rate] = row.val_loss
        for contestant, by_rate in losses.items():
            if len(by_rate) >= 3:
                found.setdefault(contestant, (min(by_rate, key=lambda rate: (by_rate[rate], rate)), plan))
    return dict(sorted(found.items()))


def rates_file() -> str:
    """What spheret/train/rates.toml holds."""
    lines = [
        "# The learning rate that a run takes where none is given: the best one at 12 layers of width 64, 300",
        "# updates, by the study that found it. `make results` writes this file from the rows of docs/results.",
    ]
    found = default_rates()
    for plan in RATES_FROM:
        of_plan = [f'"{contestant}" = {rate:g}' for contestant, (rate, found_by) in found.items() if found_by == plan]
        lines += [f"[{plan}]", *of_plan] if of_plan else []
    return "\n".join(lines) + "\n"


class Study:
    """The rows of a plan, by the name of their file, with all that follows from them."""

    def __init__(self, name: str) -> None:
        self.name, self.rows = name, rows_of(name)
        self.found = study_findings(read_plan(STUDIES[name]), self.rows, read_ngrams(HERE / f"{name}.jsonl"))
        self.sections = sections_of(self.found)

    @cached_property
    def answers(self) -> dict[str, GroupAnswer]:
        return {answer.group.name: answer for answer in self.found.answers}

    @cached_property
    def charts(self) -> dict[str, Chart]:
        """Every chart by its file. A study that has not begun, and the one of one seed, have none."""
        if not self.rows or self.name == "defaults":
            return {}
        charts = [each for section in self.sections for each in section.charts if not each.name.endswith("-curves")]
        lead = lead_chart(self.found.answers) if self.name == "length" else None
        return {f"{chart.name}.svg": chart for chart in [*charts, *([lead] if lead else [])]}

    @property
    def tables(self) -> str:
        """All tables but the one of every run, which the rows have."""
        tables = [table for section in self.sections for table in section.tables if table.name != "runs"]
        # they have no title of their own, and every page of the site has a different one
        return f"# All tables of {TITLES[self.name]}\n\n" + to_markdown(tables)

    @property
    def parts(self) -> dict[tuple[str, str], str]:
        """What a page may ask for, by its kind and name. The first study's names are plain."""
        own, answers = self._own(), self.found.answers
        names = [*self.answers, *{answer.group.part.name for answer in answers}]
        for name, (end, words) in product(names, SHOWN.items()):
            file = f"{name}-{end}.svg"
            text = f"![{words}](figures/{file})\n" if file in self.charts else "(no figure yet)\n"
            own["figure", f"{name}-{end}"] = text
        prefix = "" if self.name == "results" else f"{self.name}."
        return {
            ("receipt", self.name): _receipt(self.rows),
            **{(kind, prefix + name): text for (kind, name), text in own.items()},
        }

    def _own(self) -> dict[tuple[str, str], str]:
        sentences = [endpoint_sentence(answer) for answer in self.found.endpoints]
        parts = {("endpoints", "all"): _bullets(sentences), ("finished", "all"): _finished(self.found.endpoints)}
        for name, answer in self.answers.items():
            parts["sentence", name] = f"{answer_sentence(answer)}\n"
            parts["limits", name] = _bullets(limits(answer))
        for section in self.sections:
            if section.name == "not-run":
                parts["sentence", "not-run"] = f"{section.paragraphs[0]}\n"
            for table in section.tables:
                # the heading is the page's own
                parts["table", table.name] = to_markdown([table]).split("\n\n", 1)[1]
        return parts


def marked_parts(every: Sequence[Study]) -> dict[tuple[str, str], str]:
    """The text of every part that a page may ask for, by its kind and name."""
    studies, looked = {study.name: study.answers for study in every}, inside.read_rows()
    depth = [answer for answer in studies["depth"].values() if answer.group.part.name == "depth"]
    lead = f"{_by_length(studies) or 'Not run yet.'} [Length](results/length.md)."
    summaries = {
        "warm-up": _warm_ups(studies["results"]),
        "paper": _beside_the_paper(studies["results"]["nine"]),
        "modern": _optimisers(studies["modern"]),
        "shifted": _heads(studies["modern"]),
        "streams": _by_size(list(studies["streams"].values())),
        "length": _by_size(list(studies["length"].values())),
        "depth": _by_size(depth),
        "defaults": _default_rates(studies["defaults"]["defaults"]),
        "claims": claims_table(studies, collapse_tables.same_cells(collapse.read_rows()), looked),
        "inside": f"![{INSIDE}](figures/inside.svg)\n" if inside.chart(looked) else "(no figure yet)\n",
        "head": _worth_of_the_head(studies),
        "finding": _finding(studies),
        "lead": f"- **How long the lead of the projection lasts.** {lead}\n",
        "connections": _connections(studies),
        "members": _members(studies["depth"]["depth"]),
    }
    parts = {("summary", name): text for name, text in summaries.items()}
    for study in every:
        parts |= study.parts
    return parts | collapse_tables.parts()


def rows_of(study: str) -> dict[Key, Row]:
    """The rows of a study; none if it has not begun."""
    path = HERE / f"{study}.jsonl"
    return read_rows(path) if path.exists() else {}


def endpoint_sentence(answer: EndpointAnswer) -> str:
    """The answer of an endpoint, as far as it is known."""
    if answer.endpoint.kind == "stress":
        return _stress_sentence(answer)
    if answer.endpoint.kind == "equivalence":
        counts = Counter(each.verdict for each in answer.comparisons)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return (
            f"{listed(answer.endpoint.contestants)}, within {answer.endpoint.margin:g} of each other: of "
            f"{len(answer.comparisons)} pairs and sizes, {verdicts}."
        )
    first, second = answer.endpoint.contestants
    words = [_gap_words(each) for each in answer.comparisons]
    return f"{first} against {second}: {'; '.join(words)}{_slope_words(answer.slope)}."


def _finished(endpoints: Sequence[EndpointAnswer]) -> str:
    """The differences that have all their seeds, with their intervals, and how many questions have none yet."""
    lines = []
    for answer in endpoints:
        done = [number(each) for each in answer.comparisons if each.seeds == each.planned]
        if done and answer.endpoint.kind == "equivalence":
            lines.append(endpoint_sentence(answer))
        elif done:
            lines.append(f"{' minus '.join(answer.endpoint.contestants)}: {'; '.join(done)}.")
    left = len(endpoints) - len(lines)
    return _bullets([*lines, *([f"Not finished: {left} of {len(endpoints)} questions of the plan."] if left else [])])


def _gap_words(each: PairedComparison) -> str:
    if each.verdict in ("not run", "failed") or each.interval is None:
        return f"{each.where}: {_without_verdict(each)}"
    if each.verdict == "no significant difference":
        return f"{each.where}: no significant difference ({each.interval.estimate:+.3f})"
    side = "below" if each.verdict == "lower" else "above"
    return f"{each.where}: {abs(each.interval.estimate):.3f} {side}"


def _slope_words(slope: PairedComparison | None) -> str:
    if slope is None:
        return ""
    if slope.verdict in ("not run", "failed") or slope.interval is None:
        return f"; {slope.where}: {_without_verdict(slope)}"
    change = f"{slope.interval.estimate:+.3f} {slope.where}"
    if slope.verdict == "no significant difference":
        return f"; no significant change with size ({change})"
    return f"; the difference changes by {change} ({p_words(slope.p or 0.0)})"


def _without_verdict(each: PairedComparison) -> str:
    return f"no mean, {each.trouble}" if each.verdict == "failed" else f"not run ({each.trouble})"


def _stress_sentence(answer: EndpointAnswer) -> str:
    begun = [each for each in answer.stresses if each.runs]
    opening = f"At {answer.factor:g} times the best rate"
    if not begun:
        return f"{opening}: not run."
    by_rung: dict[str, list[str]] = {}
    for each in begun:
        some = "" if len(each.runs) == each.planned else f", {each.planned} planned"
        words = f"{each.label} in {len(each.failed)} of {len(each.runs)} seeds{some}"
        by_rung.setdefault(each.where, []).append(words)
    rungs = [f"{where}: {listed(names)}" for where, names in by_rung.items()]
    return f"{opening}, collapsed or diverged: {'; '.join(rungs)}."


def _bullets(sentences: Sequence[str]) -> str:
    return "".join(f"- {sentence}\n" for sentence in sentences)


def _receipt(rows: Mapping[Key, Row]) -> str:
    seconds = {row.run: row.seconds for row in rows.values()}
    return f"{len(seconds)} runs, {sum(seconds.values()) / 3600:.1f} hours of training on one core each.\n"


def _optimisers(answers: Mapping[str, GroupAnswer]) -> str:
    """The losses and the rates of the six under both optimisers, as a table."""
    columns = {"AdamW": answers["adamw"], "Muon": answers["muon"]}
    lines = [
        f"| connection | {' | '.join(f'{name}: loss | rate' for name in columns)} |",
        "|---|" + "---:|" * (2 * len(columns)),
    ]
    for contestant in answers["muon"].group.contestants:
        cells = []
        for answer in columns.values():
            means, entry = answer.means, answer.by_label[contestant.label]
            loss = f"{means[entry.label]:.3f}" if entry.label in means else entry.reason
            loss = f"**{loss}**" if means.get(entry.label, 0) == min(means.values(), default=-1) else loss
            cells += [loss, "-" if entry.rate is None else f"{entry.rate:.2g}"]
        lines.append(f"| {contestant.label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _warm_ups(answers: Mapping[str, GroupAnswer]) -> str:
    """The losses of a few contestants under both warm-ups, as a table."""
    labels = ("pre-ln", "post-ln", "proj-spheretnorm", "proj-spheretnorm (schedule=constant)")
    lines = [f"| warm-up | {' | '.join(labels)} |", "|---|" + "---:|" * len(labels)]
    for words, name in (("90 updates", "warm"), ("30 updates", "nine")):
        answer = answers[name]
        means = answer.means
        # what is no contestant of this part was begun in another one of the same warm-up
        entries = {**answers["schedules"].by_label, **answer.by_label}
        cells = [f"{means[label]:.3f}" if label in means else _so_far(entries[label]) for label in labels]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _finding(studies: Studies) -> str:
    """What README says first: the lead, its size, how long it was looked at, and what became of it later."""
    rungs = list(
        ladder_of(
            [answer for answer in studies["depth"].values() if answer.group.part.name == "depth"]
        ).rungs.values()
    )
    gaps = [comparison(answer, PROJ, PRE, where(answer)) for answer in rungs]
    assert all(gap.verdict == "lower" and gap.interval is not None for gap in gaps)
    leads = listed([f"{-gap.interval.estimate:.2f}" for gap in gaps if gap.interval is not None])
    layers = listed([str(answer.group.value("layers")) for answer in rungs])
    first, seeds = rungs[0].group, gaps[0].seeds
    words = (
        f"**What we found:** after {first.value('steps')} updates at width {first.value('width')}, the loss of the "
        f"projection is {leads} nats below Pre-LN's at {layers} layers ({seeds} seeds).\nA training step takes "
        f"{_step_times()['proj-spheretnorm']:.2f} times as long. All of these models are still between a bigram and "
        "a trigram"
    )
    page = "([length](docs/results/length.md))"
    if not _by_length(studies):
        later = f"how much of the lead stays when they train on is not known yet {page}"
        return f"{words}:\n{later}. No GPU was available.\n"
    picture = f"![{LEAD}](docs/results/figures/length-lead.svg)"
    return f"{words}.\n{_by_length(studies)} {page} No GPU was available.\n\n{picture}\n"


def _by_length(studies: Studies) -> str:
    """The lead after each length of training, and what becomes of it; empty before two lengths are done."""
    at_12 = _complete(studies["length"].values())
    every = [*at_12, *_complete(studies["length-deep"].values())]
    numbers = "; ".join(number(comparison(answer, PROJ, PRE, where(answer))) for answer in every)
    return f"By length of training: {numbers}.\n{_change(at_12)}" if len(at_12) > 1 else ""


LEAD = "Validation loss by tokens beside n-gram models, and the difference to Pre-LN with its 95% interval"


def _complete(answers: Iterable[GroupAnswer]) -> list[GroupAnswer]:
    """The rungs that have all seeds of Pre-LN and the projection, from the shortest training on."""
    found = [answer for answer in answers if comparison(answer, PROJ, PRE, "").verdict != "not run"]
    return sorted(found, key=lambda answer: int(answer.group.value("steps")))


def _change(rungs: Sequence[GroupAnswer]) -> str:
    """Whether the lead is another one after the longest training, and whether there is one, in a sentence each."""
    first, last = (differences(answer, PROJ, PRE) for answer in (rungs[0], rungs[-1]))
    change = over_seeds([last[seed] - first[seed] for seed in sorted(first.keys() & last.keys())])
    number = f"by {abs(change.estimate):.3f} ({change.low:+.3f} to {change.high:+.3f})"
    word = "shrinks" if change.estimate > 0 else "grows"
    words = f"From the first of these lengths to the last the lead {word} {number}"
    if change.p >= ALPHA:
        words += ", which is not significant"
    verdict = comparison(rungs[-1], PROJ, PRE, "").verdict
    left = {"lower": "a lead is left", "higher": "Pre-LN is ahead"}.get(verdict, "no significant lead is left")
    return f"{words}; at the end {left}."


def lead_chart(answers: Sequence[GroupAnswer]) -> Chart | None:
    """Losses by tokens beside n-gram models, and the differences to Pre-LN; None before two rungs are done."""
    rungs = _complete(answers)
    if len(rungs) < 2:
        return None
    schemes = {label: label for label in (PRE, PROJ, NORMED, POST)}
    styles, losses, gaps = scheme_styles(schemes, SCHEMES), list[Line](), list[Line]()
    tokens = {answer.group.name: float(answer.rows[0].tokens) for answer in rungs}
    for label, style in styles.items():
        entries = {tokens[answer.group.name]: answer.by_label[label] for answer in rungs}
        done = {x: entry for x, entry in entries.items() if len(entry.finals) == entry.planned and not entry.failed}
        seeds = [sorted(row.loss for row in entry.finals.values()) for entry in done.values()]
        low, high = [each[0] for each in seeds], [each[-1] for each in seeds]
        losses += [Line(label, list(done), [entry.mean for entry in done.values()], style, low, high, mark="o")]
        pairs = [(tokens[answer.group.name], comparison(answer, label, PRE, "")) for answer in rungs]
        known = [(x, pair.interval) for x, pair in pairs if pair.interval and not pair.trouble and label != PRE]
        if known:
            places, found = zip(*known, strict=True)
            ends = [each.low for each in found], [each.high for each in found]
            gaps += [Line(label, places, [each.estimate for each in found], style, *ends, mark="o")]
    for dash, name in enumerate(("bigram", "trigram", "4-gram"), start=1):
        points = [(tokens[answer.group.name], answer.ngrams[name]) for answer in rungs if name in answer.ngrams]
        places, values = [x for x, _ in points], [y for _, y in points]
        losses += [Line(name, places, values, (MUTED, DASHES[dash]))] if points else []
    ticks = {x: f"{x / 1e6:.1f}M" for x in tokens.values()}
    panels = [
        Panel(losses, "tokens", "validation loss (nats)", log_x=True, ticks=ticks),
        Panel(gaps, "tokens", "loss minus Pre-LN's", log_x=True, ticks=ticks, level=(0.0, "")),
    ]
    return Chart("length-lead", f"12 layers of width 64: {LEAD}", panels)


def _default_rates(answer: GroupAnswer) -> str:
    """The losses of one seed at every rate, and the rate that a run takes by default, as a table."""
    lines = ["| connection | loss at each rate, one seed | default rate |", "|---|---|---:|"]
    found = default_rates()
    for label in (contestant.label for contestant in answer.group.contestants):
        tries = sorted(answer.by_label[label].tries, key=lambda row: row.rate)
        cells = [f"{f'{row.loss:.3f}' if sound(row) else row.state} at {row.rate:g}" for row in tries]
        rate = f"{found[label][0]:g} ({found[label][1]})" if label in found else "0.001 (no study)"
        lines.append(f"| {label} | {', '.join(cells) or 'not run'} | {rate} |")
    return "\n".join(lines) + "\n"


def _step_times() -> dict[str, float]:
    """The time of a training step of nanoGPT S by scheme, as a multiple of Pre-LN's."""
    return {row["name"]: row["float32"]["x pre-ln"] for row in json.loads(STEP.read_text())["table"]}


def _connections(studies: Studies) -> str:
    """The losses of the depth study by size, and the time of a step of nanoGPT S, as a table of finished rows."""
    by_size = ladder_of([answer for answer in studies["depth"].values() if answer.group.part.name == "depth"]).rungs
    step = _step_times()
    lines = [f"| connection | {' | '.join(by_size)} | step |", "|---|" + "---:|" * (len(by_size) + 1)]
    for contestant in next(iter(by_size.values())).group.contestants:
        entries = [answer.by_label[contestant.label] for answer in by_size.values()]
        if all(len(entry.finals) == entry.planned and not entry.failed for entry in entries):
            losses = " | ".join(f"{entry.mean:.3f}" for entry in entries)
            lines.append(f"| {contestant.label} | {losses} | {step[contestant.label]:.2f} |")
    return "\n".join(lines) + "\n"


def _members(answer: GroupAnswer) -> str:
    """The losses of the family's members at one learning rate, by the tuning seeds that all of them have."""
    labels = (
        "p-spheretnorm",
        "proj-spheretnorm",
        "cay-spheretnorm",
        "geonorm",
        "proj-spheretnorm (schedule=constant)",
    )
    rows = {
        label: {(row.rate, row.seed): row.val_loss for row in answer.by_label[label].tries if sound(row)}
        for label in labels
    }
    shared = sorted(set.intersection(*map(set, rows.values())))
    columns = " | ".join(f"seed {seed}, {rate:g}" for rate, seed in shared)
    lines = [f"| connection | {columns} |", "|---|" + "---:|" * len(shared)]
    lines += [f"| {label} | {' | '.join(f'{found[key]:.3f}' for key in shared)} |" for label, found in rows.items()]
    return "\n".join(lines) + "\n"


def _worth_of_the_head(studies: Studies) -> str:
    """What the shifted head changes for the projection and for Pre-LN, by the seeds that both studies have."""

    def gained(label: str, warmed: str) -> tuple[float, int]:
        shifted, tied = studies["depth"]["depth"].by_label[label], studies["results"][warmed].by_label[label]
        seeds = sorted(set(shifted.finals) & set(tied.finals))
        return math.fsum(shifted.finals[seed].loss - tied.finals[seed].loss for seed in seeds) / len(seeds), len(
            seeds
        )

    (projection, seeds), (other, _) = gained("proj-spheretnorm", "warm"), gained("pre-ln", "nine")
    entries = studies["depth"]["depth"].by_label
    lead = entries["proj-spheretnorm"].mean - entries["pre-ln"].mean
    return (
        f"The shifted head is worth {projection:+.3f} to the projection (against the tied head with the warm-up of "
        f"90 updates that it needs) and {other:+.3f} to Pre-LN, by the same {seeds} seeds on two kinds of processor: "
        f"{projection / lead:.0%} of the lead of {-lead:.3f} at 12 layers come from the head.\n"
    )


def _so_far(entry: Entry) -> str:
    """Why a contestant has no mean. The losses of its search do not stand beside those of fresh seeds."""
    return SHORT.get(entry.state, entry.reason) if entry.tries else "not run"


def _heads(answers: Mapping[str, GroupAnswer]) -> str:
    """The losses with a tied and with a shifted head, by optimiser, as a table."""
    parts = {"AdamW": "adamw", "Muon": "muon"}
    heads = {"tied": "", "shifted": "-shifted"}
    lines = [
        f"| connection | {' | '.join(f'{name}, {head}' for name in parts for head in heads)} |",
        "|---|" + "---:|" * (len(parts) * len(heads)),
    ]
    for contestant in answers["adamw-shifted"].group.contestants:
        columns = [answers[part + end] for part in parts.values() for end in heads.values()]
        lines.append(
            f"| {contestant.label} | {' | '.join(_loss(each.by_label[contestant.label]) for each in columns)} |"
        )
    return "\n".join(lines) + "\n"


def _loss(entry: Entry) -> str:
    """The mean loss of the fresh seeds and their rate, or what there is instead."""
    if entry.failed or not entry.finals or entry.rate is None:
        return entry.failure or _so_far(entry)
    seeds = "" if len(entry.finals) == entry.planned else f", {len(entry.finals)} of {entry.planned} seeds"
    return f"{entry.mean:.3f} at {entry.rate:.2g}{seeds}"


def _by_size(rungs: Sequence[GroupAnswer]) -> str:
    """The losses of a part at every size, as a table of the contestants that have fresh seeds."""
    by_size = ladder_of(rungs).rungs
    lines = [f"| connection | {' | '.join(by_size)} |", "|---|" + "---:|" * len(by_size)]
    for contestant in rungs[0].group.contestants:
        entries = [answer.by_label[contestant.label] for answer in by_size.values()]
        if any(entry.finals for entry in entries):
            lines.append(f"| {contestant.label} | {' | '.join(map(_loss, entries))} |")
    return "\n".join(lines) + "\n"


def _beside_the_paper(ours: GroupAnswer) -> str:
    """The paper's validation losses and the means of a part of ours, as a table. Bold is the lowest of a column."""
    means = ours.means
    reasons = {entry.label: entry.reason for entry in ours.entries}
    paper = {
        scheme: [float(LOSSES[row, corpus, size].val) for corpus in CORPORA for size in SIZES]
        for row, scheme in ROWS.items()
    }
    lowest = [min(column) for column in zip(*paper.values(), strict=True)]
    sizes = ", ".join(SIZES)
    lines = [
        f"| scheme | {' | '.join(f'paper: {corpus}, size {sizes}' for corpus in CORPORA.values())} | here |",
        "|---|" + "---:|" * (len(CORPORA) + 1),
    ]
    for label in (*paper, *(label for label in means if label not in paper)):
        losses = zip(paper.get(label, ()), lowest, strict=False)
        cells = [f"**{loss:.3f}**" if loss == low else f"{loss:.3f}" for loss, low in losses]
        corpora = [", ".join(cells[i : i + len(SIZES)]) or "-" for i in range(0, len(lowest), len(SIZES))]
        here = f"{means[label]:.3f}" if label in means else reasons.get(label, "not run")
        here = f"**{here}**" if means.get(label) == min(means.values()) else here
        lines.append(f"| {label} | {' | '.join(corpora)} | {here} |")
    return "\n".join(lines) + "\n"


def filled(text: str, parts: dict[tuple[str, str], str], figures: str = "figures") -> str:
    """A page with its marked parts written anew. figures: where the figures lie, from the page."""

    def part(match: re.Match[str]) -> str:
        key = match["kind"], match["name"]
        if key not in parts:
            raise KeyError(f"no {match['kind']} of the name {match['name']}: {sorted(parts)}")
        return f"{match['begin']}{parts[key].replace('](figures/', f']({figures}/')}{match['end']}"

    return MARKED.sub(part, text)


def files() -> dict[Path, bytes]:
    """The content of every file that follows from the results."""
    every = [Study(name) for name in STUDIES]
    parts = marked_parts(every)
    figures = {page: os.path.relpath(HERE / "figures", page.parent) for page in PAGES}
    pages = {page: filled(page.read_text(), parts, figures[page]) for page in PAGES}
    # a study has more figures, and may have more tables, than pages need
    shown = "".join(pages.get(page) or page.read_text() for page in HERE.parent.rglob("*.md"))
    written = {page: text.encode() for page, text in pages.items()}
    charts = {name: chart for study in every for name, chart in study.charts.items()}
    looked = inside.chart(inside.read_rows())
    charts |= {"inside.svg": looked} if looked else {}
    for name, chart in charts.items():
        if f"figures/{name}" in shown:
            written[HERE / "figures" / name] = draw(chart, with_png=False).themed_svg.encode()
    written[HERE / "figures" / "collapse.svg"] = collapse_tables.figure().themed_svg.encode()
    for study in every:
        name = "tables.md" if study.name == "results" else f"{study.name}-tables.md"
        if study.rows and name in shown:
            written[HERE / name] = study.tables.encode()
    written[RATES] = rates_file().encode()
    return written


if __name__ == "__main__":
    wanted = files()
    (HERE / "figures").mkdir(exist_ok=True)
    for path, data in wanted.items():
        path.write_bytes(data)
    for path in (HERE / "figures").iterdir():
        if path not in wanted:
            path.unlink()
