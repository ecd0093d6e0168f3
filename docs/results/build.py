"""Write all that follows from the results in docs/results: figures, tables, and the marked parts of pages.

`make results` runs it. A marked part begins with a comment such as `<!-- sentence nine -->` or `<!-- table
losses-nine -->` and ends with `<!-- end -->`. What stands between them is written by this script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import collapse_tables

from spheret.report.paper_numbers import CORPORA, LOSSES, ROWS, SIZES
from spheret.report.tables import to_markdown
from spheret.study.answers import GroupAnswer, group_answers
from spheret.study.ladders import ladders
from spheret.study.plan import OURS, PLANS, read_plan
from spheret.study.report import result_files
from spheret.study.rows import Key, Row, read_rows
from spheret.study.sections import sections_of
from spheret.study.transfer import transfers
from spheret.study.transfer_section import transfer_sentences
from spheret.study.words import answer_sentence, limits

HERE = Path(__file__).parent
# the plan of every study, by the name of its results
STUDIES = {"results": OURS, "modern": PLANS["modern"], "transfer": PLANS["transfer"]}
PAGES = (
    HERE / "README.md",
    HERE / "modern.md",
    HERE / "transfer.md",
    HERE.parent / "collapse.md",
    HERE.parent / "which-connection.md",
    HERE.parents[1] / "README.md",
)
MARKED = re.compile(r"(?P<begin><!-- (?P<kind>\w+) (?P<name>[\w.-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def marked_parts() -> dict[tuple[str, str], str]:
    """The text of every part that a page may ask for, by its kind and name."""
    parts: dict[tuple[str, str], str] = {}
    for study, path in STUDIES.items():
        rows = read_rows(HERE / f"{study}.jsonl")
        answers = group_answers(read_plan(path), rows)
        # the first study's names are plain
        prefix = "" if study == "results" else f"{study}."
        parts |= {(kind, prefix + name): text for (kind, name), text in _of_a_study(answers, rows).items()}
        parts["receipt", study] = _receipt(rows)
        if study == "results":
            parts["summary", "warm-up"] = _warm_ups({answer.group.name: answer for answer in answers})
            parts["summary", "paper"] = _beside_the_paper(
                next(answer for answer in answers if answer.group.name == "nine")
            )
        if study == "modern":
            parts["summary", "modern"] = _optimisers({answer.group.name: answer for answer in answers})
    return parts | collapse_tables.parts()


def _of_a_study(answers: Sequence[GroupAnswer], rows: Mapping[Key, Row]) -> dict[tuple[str, str], str]:
    parts = {}
    for answer in answers:
        parts["sentence", answer.group.name] = f"{answer_sentence(answer)}\n"
        parts["limits", answer.group.name] = _bullets(limits(answer))
    for transfer in transfers(answers):
        parts["transfer", transfer.part] = _bullets(transfer_sentences(transfer))
    for section in sections_of(answers, ladders(answers), rows):
        for table in section.tables:
            # the heading is the page's own
            parts["table", table.name] = to_markdown([table]).split("\n\n", 1)[1]
    return parts


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
            means = {} if answer.layout is None else answer.layout.means
            entry = answer.by_label[contestant.label]
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
        means = {} if answer.layout is None else answer.layout.means
        entries = {entry.label: entry.reason for entry in answer.entries}
        cells = [f"{means[label]:.3f}" if label in means else entries.get(label, "not run") for label in labels]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _beside_the_paper(ours: GroupAnswer) -> str:
    """The paper's validation losses and the means of a part of ours, as a table. Bold is the lowest of a column."""
    means = {} if ours.layout is None else ours.layout.means
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


def files() -> dict[Path, bytes]:
    """The content of every file that follows from the results."""
    written: dict[Path, bytes] = {}
    # a study has more figures than pages need
    shown = "".join(page.read_text() for page in HERE.parent.rglob("*.md"))
    for study, plan in STUDIES.items():
        made = result_files(read_plan(plan), read_rows(HERE / f"{study}.jsonl"))
        # a study's tables have no title of their own
        tables = b"# All tables of the study\n\n" + made.pop("tables.md")
        written[HERE / ("tables.md" if study == "results" else f"{study}-tables.md")] = tables
        written |= {HERE / "figures" / name: data for name, data in made.items() if f"figures/{name}" in shown}
    written[HERE / "figures" / "collapse.svg"] = collapse_tables.figure().svg.encode()
    parts = marked_parts()
    return written | {page: filled(page.read_text(), parts).encode() for page in PAGES}


if __name__ == "__main__":
    wanted = files()
    (HERE / "figures").mkdir(exist_ok=True)
    for path, data in wanted.items():
        path.write_bytes(data)
    for path in (HERE / "figures").iterdir():
        if path not in wanted:
            path.unlink()
