"""Write all that follows from the results in docs/results: figures, tables, and the marked parts of pages.

`make results` runs it. A marked part begins with a comment such as `<!-- sentence nine -->` or `<!-- table
losses-nine -->` and ends with `<!-- end -->`. What stands between them is written by this script.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import collapse_tables
from scipy import stats

from spheret.lab.answers import GroupAnswer, group_answers
from spheret.lab.endpoints import ALPHA, EndpointAnswer, PairedComparison, comparison, endpoint_answers, ladder_of
from spheret.lab.entries import Entry
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
    "depth": PLANS["depth"],
    "modern": PLANS["modern"],
    "streams": PLANS["streams"],
}
# what the page of all its tables calls a study
TITLES = {
    "results": "the study",
    "depth": "the depth study",
    "modern": "the modern backbone",
    "streams": "the streams",
}
PAGES = (
    HERE / "README.md",
    HERE / "depth.md",
    HERE / "modern.md",
    HERE / "streams.md",
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
    lines = [f'"{contestant}" = {rate:g}  # {plan}' for contestant, (rate, plan) in default_rates().items()]
    head = (
        "# The learning rate that a run takes where none is given: the best one at 12 layers of width 64, 300 updates,\n"
        "# and the study that found it. `make results` writes this file from the rows of docs/results.\n"
    )
    return head + "[rates]\n" + "\n".join(lines) + "\n"


def marked_parts(drawn: Mapping[str, Mapping[str, bytes]]) -> dict[tuple[str, str], str]:
    """The text of every part that a page may ask for, by its kind and name. drawn: the figures of each study."""
    parts: dict[tuple[str, str], str] = {}
    for study, path in STUDIES.items():
        rows, plan = read_rows(HERE / f"{study}.jsonl"), read_plan(path)
        answers = group_answers(plan, rows)
        # the first study's names are plain
        prefix = "" if study == "results" else f"{study}."
        parts |= {(kind, prefix + name): text for (kind, name), text in _of_a_study(plan, answers, rows).items()}
        parts |= {("figure", prefix + name): text for name, text in _figures(answers, drawn[study]).items()}
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
        if study == "depth":
            deep = [answer for answer in answers if answer.group.part.name == "depth"]
            parts["summary", "depth"] = _by_size(deep)
            parts["summary", "claims"] = _claims_table(deep)
    return parts | collapse_tables.parts()


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


def _of_a_study(plan: Plan, answers: Sequence[GroupAnswer], rows: Mapping[Key, Row]) -> dict[tuple[str, str], str]:
    parts = {}
    endpoints = endpoint_answers(plan.endpoints, answers)
    parts["endpoints", "all"] = _bullets([endpoint_sentence(answer) for answer in endpoints])
    for answer in answers:
        parts["sentence", answer.group.name] = f"{answer_sentence(answer)}\n"
        parts["limits", answer.group.name] = _bullets(limits(answer))
    for section in sections_of(study_findings(plan, rows)):
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
    """The losses of a part at every size, as a table."""
    by_size = ladder_of(rungs).rungs
    lines = [f"| connection | {' | '.join(by_size)} |", "|---|" + "---:|" * len(by_size)]
    for contestant in rungs[0].group.contestants:
        cells = [_loss(answer.by_label[contestant.label]) for answer in by_size.values()]
        lines.append(f"| {contestant.label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# a claim of the paper's, its section there, and two contestants: the first has the lower loss, at these sizes
LOWER = (
    ("SpheretNorm has a lower loss than Pre-LN at 24 and 36 layers.", "proj-spheretnorm", "pre-ln", (24, 36)),
    ("At 12 layers Pre-LN has the lower loss.", "pre-ln", "proj-spheretnorm", (12,)),
    ("SpheretNorm has a lower loss than Peri-LN at 24 and 36 layers.", "proj-spheretnorm", "peri-ln", (24, 36)),
    ("SpheretNorm has a lower loss than KEEL.", "proj-spheretnorm", "keel", (12, 24, 36)),
    ("SpheretNorm has a lower loss than GeoNorm, the exponential map.", "proj-spheretnorm", "geonorm", (12, 24, 36)),
    ("Peri-LN is the strongest baseline at 24 and 36 layers.", "peri-ln", "pre-ln", (24, 36)),
    ("KEEL is among the weakest.", "pre-ln", "keel", (12, 24, 36)),
)
PRETRAINING = "Pre-Training Language Models"
CONSTANT = "proj-spheretnorm (schedule=constant)"


def verdict_of(comparisons: Sequence[PairedComparison]) -> str:
    """Whether a claim holds that the first of each comparison has the lower loss, or lies within the margin."""
    verdicts = {each.verdict for each in comparisons}
    if "higher" in verdicts or any(_outside(each) for each in comparisons):
        return "does not hold"
    if verdicts <= {"lower", "equivalent"}:
        return "holds"
    return "not run" if "not run" in verdicts else "not decided"


def _outside(each: PairedComparison) -> bool:
    """Whether the interval of a comparison with a margin lies beyond it."""
    if each.margin is None or each.interval is None or each.verdict != "not shown":
        return False
    return each.interval.low > each.margin or each.interval.high < -each.margin


def _fewer(rungs: Sequence[GroupAnswer], first: str, second: str) -> tuple[str, str]:
    """Whether the first fails in fewer seeds under stress than the second (Fisher's exact test), and the counts."""
    counts = []
    for label in (first, second):
        runs = [row for answer in rungs for row in answer.by_label[label].stressed.values()]
        counts.append((sum(not sound(row) for row in runs), len(runs)))
    (few, run), (many, others) = counts
    words = f"{first} in {few} of {run} seeds, {second} in {many} of {others}"
    if not run and not others:
        return "not run", "-"
    if run < sum(answer.group.part.compared_with for answer in rungs) or others < run:
        return "not run", words
    if stats.fisher_exact([[few, run - few], [many, others - many]]).pvalue >= ALPHA:
        return "not decided", words
    return ("holds" if few < many else "does not hold"), words


def _claims_table(rungs: Sequence[GroupAnswer]) -> str:
    """What the paper claims, where, whether it holds here, and by which numbers."""
    ladder = ladder_of(rungs)

    def compared(
        first: str, second: str, layers: Sequence[int], margin: float | None = None
    ) -> list[PairedComparison]:
        sizes = [f"layers {count}" for count in layers]
        return [comparison(ladder.rungs[size], first, second, size, margin) for size in sizes]

    lines = ["| the paper's claim | where | here | by which numbers |", "|---|---|---|---|"]

    def add(claim: str, where: str, verdict: str, numbers: str) -> None:
        lines.append(f"| {claim} | {where} | **{verdict}** | {numbers} |")

    for claim, first, second, layers in LOWER:
        lower = compared(first, second, layers)
        add(claim, PRETRAINING, verdict_of(lower), f"{first} - {second}: {_numbers(lower)}")
    slope = ladder.slope("proj-spheretnorm", "pre-ln")
    assert slope is not None
    add("Its gain over Pre-LN grows with depth.", PRETRAINING, verdict_of([slope]), _numbers([slope]))
    three = ("p-spheretnorm", "proj-spheretnorm", "cay-spheretnorm")
    alike = {pair: compared(*pair, (12, 24, 36), 0.04) for pair in combinations(three, 2)}
    every = [each for lines in alike.values() for each in lines]
    numbers = "; ".join(f"{first} - {second}: {_numbers(lines)}" for (first, second), lines in alike.items())
    add("p = 0.5, 1 and 2 are within 0.04 of one another.", PRETRAINING, verdict_of(every), numbers)
    square_root = compared("proj-spheretnorm", CONSTANT, (12, 24, 36))
    add(
        "Steps that shrink as 1/sqrt(l) are better than steps that do not.",
        "Implementation Details; Analysis",
        verdict_of(square_root),
        f"sqrt - constant: {_numbers(square_root)}",
    )
    for first, second, claim, where in (
        ("proj-spheretnorm", "pre-ln", "SpheretNorm trains where Pre-LN destabilises.", PRETRAINING),
        ("proj-spheretnorm", "keel", "SpheretNorm trains where KEEL destabilises.", PRETRAINING),
        ("pre-ln", "post-ln", "Post-LN is less stable than Pre-LN.", "Introduction; Related Work"),
    ):
        verdict, counts = _fewer(rungs, first, second)
        add(claim, where, verdict, f"failed at {rungs[0].group.part.stress:g} times the best rate: {counts}")
    unbounded = "Cayley and p above 1 need a cap of pi/4 on the angle, or training becomes unstable."
    add(unbounded, "Implementation Details", "not run", "Cayley has the cap in all runs here")
    zero_shot = "SpheretNorm has the best zero-shot scores, and is ahead of GeoNorm in all twelve."
    add(zero_shot, "Downstream Evaluations", "not testable here", "these models are far too small for the tasks")
    return "\n".join(lines) + "\n"


def _numbers(comparisons: Sequence[PairedComparison]) -> str:
    if not any(each.seeds or each.failed for each in comparisons):
        return "-"
    return ", ".join(
        f"{each.where} {each.interval.estimate:+.3f} ({each.interval.low:+.3f} to {each.interval.high:+.3f})"
        if each.interval is not None and not each.trouble
        else f"{each.where} {each.verdict} ({each.trouble})"
        for each in comparisons
    )


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


def result_files(plan: Plan, rows: Mapping[Key, Row]) -> dict[str, bytes]:
    """The figures and the tables of a study, by file name. Its results.jsonl has every run."""
    sections = sections_of(study_findings(plan, rows))
    tables = [table for section in sections for table in section.tables]
    charts = [each for section in sections for each in section.charts if not each.name.endswith("-curves")]
    return {
        "tables.md": to_markdown(table for table in tables if table.name != "runs").encode(),
        **{f"{chart.name}.svg": draw(chart).themed_svg.encode() for chart in charts},
    }


def files() -> dict[Path, bytes]:
    """The content of every file that follows from the results."""
    made = {
        study: result_files(read_plan(plan), read_rows(HERE / f"{study}.jsonl")) for study, plan in STUDIES.items()
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
