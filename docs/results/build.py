"""Write all that follows from the results in docs/results: figures, tables, and the marked parts of pages.

`make results` runs it. A marked part begins with a comment such as `<!-- sentence nine -->` or `<!-- table
losses-nine -->` and ends with `<!-- end -->`. What stands between them is written by this script.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import collapse
import collapse_tables
from claims import Studies, claims_table, number, where

from spheret.lab.answers import GroupAnswer, group_answers
from spheret.lab.endpoints import EndpointAnswer, PairedComparison, comparison, endpoint_answers, ladder_of
from spheret.lab.entries import Entry
from spheret.lab.ngrams import NgramRecord, read_ngrams
from spheret.lab.page.section import to_markdown
from spheret.lab.plan import OURS, PLANS, Plan, read_plan
from spheret.lab.report import sections_of, study_findings
from spheret.lab.rows import Key, Row, read_rows, sound
from spheret.lab.words import SHORT, answer_sentence, limits, listed, p_words
from spheret.paper.numbers import CORPORA, LOSSES, ROWS, SIZES
from spheret.support.charts import draw

HERE = Path(__file__).parent
# the plan of every study, by the name of its results
STUDIES = {
    "results": OURS,
    **{name: PLANS[name] for name in ("depth", "modern", "streams", "length", "length-deep", "family")},
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
}
PAGES = (
    HERE / "README.md",
    HERE / "tied.md",
    HERE / "length.md",
    HERE / "depth.md",
    HERE / "modern.md",
    HERE / "streams.md",
    HERE / "collapse.md",
    HERE.parent / "collapse.md",
    HERE.parent / "which-connection.md",
    HERE.parents[1] / "README.md",
)
MARKED = re.compile(r"(?P<begin><!-- (?P<kind>\w+) (?P<name>[\w.-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


# what a figure shows, by the end of its name
SHOWN = {
    "answer": "loss of each contestant at its own best learning rate",
    "bowls": "loss by learning rate, one panel per contestant",
    "ladder": "difference to the reference by size",
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


def marked_parts(drawn: Mapping[str, Mapping[str, bytes]]) -> dict[tuple[str, str], str]:
    """The text of every part that a page may ask for, by its kind and name. drawn: the figures of each study."""
    parts: dict[tuple[str, str], str] = {}
    studies: dict[str, dict[str, GroupAnswer]] = {}
    for study, path in STUDIES.items():
        rows, plan = rows_of(study), read_plan(path)
        ngrams = read_ngrams(HERE / f"{study}.jsonl")
        answers = group_answers(plan, rows, ngrams)
        studies[study] = {answer.group.name: answer for answer in answers}
        # the first study's names are plain
        prefix = "" if study == "results" else f"{study}."
        parts |= {
            (kind, prefix + name): text for (kind, name), text in _of_a_study(plan, answers, rows, ngrams).items()
        }
        parts |= {("figure", prefix + name): text for name, text in _figures(answers, drawn.get(study, {})).items()}
        parts["receipt", study] = _receipt(rows)
        if study == "results":
            parts["summary", "warm-up"] = _warm_ups({answer.group.name: answer for answer in answers})
            parts["summary", "paper"] = _beside_the_paper(
                next(answer for answer in answers if answer.group.name == "nine")
            )
        if study == "modern":
            parts["summary", "modern"] = _optimisers({answer.group.name: answer for answer in answers})
            parts["summary", "shifted"] = _heads({answer.group.name: answer for answer in answers})
        if study == "streams":
            parts["summary", "streams"] = _by_size(answers)
        if study == "length":
            parts["summary", "length"] = _by_size(answers)
        if study == "depth":
            deep = [answer for answer in answers if answer.group.part.name == "depth"]
            parts["summary", "depth"] = _by_size(deep)
    parts["summary", "claims"] = claims_table(studies, collapse_tables.same_cells(collapse.read_rows()))
    parts["summary", "head"] = _worth_of_the_head(studies)
    parts["summary", "finding"] = _finding(studies)
    parts["summary", "connections"] = _connections(studies)
    return parts | collapse_tables.parts()


def rows_of(study: str) -> dict[Key, Row]:
    """The rows of a study; none if it has not begun."""
    path = HERE / f"{study}.jsonl"
    return read_rows(path) if path.exists() else {}


def _figures(answers: Sequence[GroupAnswer], drawn: Mapping[str, bytes]) -> dict[str, str]:
    """A line that shows a figure, by its name; or says that there is none yet."""
    names = [*(answer.group.name for answer in answers), *{answer.group.part.name for answer in answers}]
    return {
        f"{name}-{end}": f"![{words}](figures/{name}-{end}.svg)\n"
        if f"{name}-{end}.svg" in drawn
        else "(no figure yet)\n"
        for name in names
        for end, words in SHOWN.items()
    }


def _of_a_study(
    plan: Plan, answers: Sequence[GroupAnswer], rows: Mapping[Key, Row], ngrams: Sequence[NgramRecord]
) -> dict[tuple[str, str], str]:
    parts = {}
    endpoints = endpoint_answers(plan.endpoints, answers)
    parts["endpoints", "all"] = _bullets([endpoint_sentence(answer) for answer in endpoints])
    for answer in answers:
        parts["sentence", answer.group.name] = f"{answer_sentence(answer)}\n"
        parts["limits", answer.group.name] = _bullets(limits(answer))
    for section in sections_of(study_findings(plan, rows, ngrams)):
        if section.name == "not-run":
            parts["sentence", "not-run"] = f"{section.paragraphs[0]}\n"
        for table in section.tables:
            # the heading is the page's own
            parts["table", table.name] = to_markdown([table]).split("\n\n", 1)[1]
    return parts


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
    """What README says first: the lead, its size, and how long it was looked at."""
    rungs = list(
        ladder_of(
            [answer for answer in studies["depth"].values() if answer.group.part.name == "depth"]
        ).rungs.values()
    )
    gaps = [comparison(answer, "proj-spheretnorm", "pre-ln", where(answer)) for answer in rungs]
    assert all(gap.verdict == "lower" and gap.interval is not None for gap in gaps)
    leads = listed([f"{-gap.interval.estimate:.2f}" for gap in gaps if gap.interval is not None])
    layers = listed([str(answer.group.value("layers")) for answer in rungs])
    first, seeds = rungs[0].group, gaps[0].seeds
    words = (
        f"**What we found:** after {first.value('steps')} updates at width {first.value('width')}, the loss of the "
        f"projection is {leads} nats\nbelow Pre-LN's at {layers} layers ({seeds} seeds). All of these models are "
        "still between a bigram and a trigram"
    )
    later = [studies["length"][group] for group in ("length-steps1200-warmup60", "length-steps4800-warmup240")]
    every = [comparison(answer, "proj-spheretnorm", "pre-ln", where(answer)) for answer in later]
    numbers = "; ".join(number(each) for each in every if each.seeds == each.planned)
    page = "([length](docs/results/length.md))"
    if numbers:
        return f"{words}.\nLater: {numbers} {page}.\n"
    return f"{words}:\nhow much of the lead stays when they train on is not known yet {page}.\n"


def _connections(studies: Studies) -> str:
    """The losses of the depth study by size, and the time of a step of nanoGPT S, as a table of finished rows."""
    by_size = ladder_of([answer for answer in studies["depth"].values() if answer.group.part.name == "depth"]).rungs
    step = {row["name"]: row["float32"] for row in json.loads(STEP.read_text())["table"]}
    lines = [f"| connection | {' | '.join(by_size)} | step |", "|---|" + "---:|" * (len(by_size) + 1)]
    for contestant in next(iter(by_size.values())).group.contestants:
        entries = [answer.by_label[contestant.label] for answer in by_size.values()]
        if all(len(entry.finals) == entry.planned and not entry.failed for entry in entries):
            losses = " | ".join(f"{entry.mean:.3f}" for entry in entries)
            lines.append(f"| {contestant.label} | {losses} | {step[contestant.label]['x pre-ln']:.2f} |")
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
        f"90 updates that it needs) and {other:+.3f} to Pre-LN, by the same {seeds} seeds: {projection / lead:.0%} "
        f"of the lead of {-lead:.3f} at 12 layers come from the head.\n"
    )


def _so_far(entry: Entry) -> str:
    """Why a contestant has no mean, with the lowest loss of its search if that is all there is."""
    losses = {rate: loss for rate, loss in entry.search.losses.items() if math.isfinite(loss)}
    if not entry.tries:
        return "not run"
    if entry.finals or not losses:
        return SHORT.get(entry.state, entry.reason)
    best = min(losses, key=lambda rate: losses[rate])
    seeds = sorted({str(row.seed) for row in entry.tries if row.rate == best})
    words = f"seed {seeds[0]} alone" if len(seeds) == 1 else f"tuning seeds {listed(seeds)} alone"
    return f"{SHORT.get(entry.state, entry.reason)}: {losses[best]:.3f} at {best:g} with {words}"


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


def filled(text: str, parts: dict[tuple[str, str], str]) -> str:
    """A page with its marked parts written anew."""

    def part(match: re.Match[str]) -> str:
        key = match["kind"], match["name"]
        if key not in parts:
            raise KeyError(f"no {match['kind']} of the name {match['name']}: {sorted(parts)}")
        return f"{match['begin']}{parts[key]}{match['end']}"

    return MARKED.sub(part, text)


def result_files(plan: Plan, rows: Mapping[Key, Row], ngrams: Sequence[NgramRecord]) -> dict[str, bytes]:
    """The figures and the tables of a study, by file name. Its results.jsonl has every run."""
    sections = sections_of(study_findings(plan, rows, ngrams))
    tables = [table for section in sections for table in section.tables]
    charts = [each for section in sections for each in section.charts if not each.name.endswith("-curves")]
    return {
        "tables.md": to_markdown(table for table in tables if table.name != "runs").encode(),
        **{f"{chart.name}.svg": draw(chart).themed_svg.encode() for chart in charts},
    }


def files() -> dict[Path, bytes]:
    """The content of every file that follows from the results."""
    made = {
        study: result_files(read_plan(plan), rows_of(study), read_ngrams(HERE / f"{study}.jsonl"))
        for study, plan in STUDIES.items()
        if rows_of(study)
    }
    parts = marked_parts(made)
    pages = {page: filled(page.read_text(), parts) for page in PAGES}
    # a study has more figures than pages need
    shown = "".join(pages.get(page) or page.read_text() for page in HERE.parent.rglob("*.md"))
    written = {page: text.encode() for page, text in pages.items()}
    for study, contents in made.items():
        # a study's tables have no title of their own, and every page of the site has another one
        tables = f"# All tables of {TITLES[study]}\n\n".encode() + contents.pop("tables.md")
        written[HERE / ("tables.md" if study == "results" else f"{study}-tables.md")] = tables
        written |= {HERE / "figures" / name: data for name, data in contents.items() if f"figures/{name}" in shown}
    written[RATES] = rates_file().encode()
    written[HERE / "figures" / "collapse.svg"] = collapse_tables.figure().themed_svg.encode()
    return written


if __name__ == "__main__":
    wanted = files()
    (HERE / "figures").mkdir(exist_ok=True)
    for path, data in wanted.items():
        path.write_bytes(data)
    for path in (HERE / "figures").iterdir():
        if path not in wanted:
            path.unlink()
