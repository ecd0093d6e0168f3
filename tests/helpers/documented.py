"""What the pages of docs/ say that a command prints."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
ENDING = "What you should see"


def ending(page):
    """The last section of a page, whose title is `ENDING`."""
    title, _, section = (DOCS / page).read_text().rpartition("\n## ")[2].partition("\n")
    assert title == ENDING, f"{page} ends with the section {title!r}"
    return section


def shown(page):
    """The lines of the outputs that the last section of a page shows."""
    blocks = re.findall(r"```text\n(.*?)```", ending(page), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def shape(line):
    """A printed line without what differs from run to run: numbers, their signs, and the spaces that align them."""
    line = re.sub(r"\d[\d,.:]*\d|\d", "#", " ".join(line.split()))
    return line.replace(" below ", " above ")


def not_printed(page, output):
    """The lines that a page shows and a command has not printed, but for their numbers."""
    printed = {shape(line) for line in output.splitlines()}
    return [line for line in shown(page) if shape(line) not in printed]
