"""Every number of the paper that is cited in the tree is a row of the table in docs/mathematics.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mathematics.md"
ROW = re.compile(r"^\| ((?:Definition|Proposition|Eq\.|Section|Appendix) [\w.]+) \| (.+?) \|", re.MULTILINE)
# a kind, a number and the name in brackets; sections and appendices need no name
PROSE = re.compile(
    r"\b((?:Definition|Proposition|Theorem|Lemma|Corollary|Equation|Section|Appendix|Def\.|Prop\.|Eq\.)s?)"
    r" (\d+(?:\.\d+)*|[A-D](?:\.\d)?)\b(?: \(([^)]+)\))?"
)
# test functions and classes: the kind, the number and then the name
TEST = re.compile(
    r"\b(?:def test_|class Test)((?i:definition|proposition|section|appendix))_?(\d+|[A-D](?=[A-Z_]))(\w+)"
)


def numbers():
    return dict(ROW.findall(PAGE.read_text()))


def letters(name):
    return re.sub(r"[\W_]", "", name).lower()


def wrong_citations(text):
    """The citations in a text that are not rows of the table."""
    known, found = numbers(), []
    # a citation may run over the end of a line, and over the mark of a comment
    for kind, number, name in PROSE.findall(re.sub(r"\s*\n\s*(#\s*)?", " ", text)):
        row = known.get(f"{kind} {number[0] if kind == 'Appendix' else number}")
        if row is None or (kind not in ("Section", "Appendix") and row != name):
            found.append(f"{kind} {number} ({name})")
    for kind, number, rest in TEST.findall(text):
        row = known.get(f"{kind.capitalize()} {number}")
        if row is None or not letters(rest).startswith(letters(row)):
            found.append(f"{kind} {number} {rest}")
    return found


def test_the_counters_have_no_gaps():
    shared = [int(key.split()[1]) for key in numbers() if key.startswith(("Definition", "Proposition"))]
    assert shared == list(range(1, 11))
    assert [key for key in numbers() if key.startswith("Eq.")] == [f"Eq. {n}" for n in range(1, 16)]


def test_every_citation_is_a_row_of_the_table():
    paths = [path for room in ("spheret", "tests", "docs") for path in (ROOT / room).rglob("*")]
    paths += [ROOT / page for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    texts = {path: path.read_text() for path in paths if path.suffix in (".py", ".md", ".c", ".jinja")}
    # a row of the table is no citation of itself
    texts[PAGE] = ROW.sub("", texts[PAGE])
    wrong = {str(path.relative_to(ROOT)): wrong_citations(text) for path, text in texts.items()}
    assert {path: citations for path, citations in wrong.items() if citations} == {}
