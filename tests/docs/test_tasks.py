"""The pages by task: each starts with a command and ends with what the commands really print."""

import re
import shlex

import pytest
from documented import DOCS, ending, not_printed, shown

from spheret.cli import main

INDEX = (DOCS / "index.md").read_text()
# the pages of the table "you want to"
TASKS = re.findall(r"^\| [^|]+ \| `[^|]+ \| \[[^\]]+\]\(([^)]+)\) \|$", INDEX, re.MULTILINE)
TINY = (
    "--layers", "2", "--heads", "2", "--width", "32", "--block", "32", "--batch-size", "4",
    "--set", "evaluation.eval_windows=8",
    "--threads", "2",
)  # fmt: skip


def test_the_navigation_has_them_under_one_title():
    section = re.search(r"^## By task\n(.*?)(?=^## )", INDEX, re.MULTILINE | re.DOTALL).group(1)
    assert len(TASKS) == 6
    assert set(TASKS) <= set(re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", section, re.MULTILINE))


@pytest.mark.parametrize("page", TASKS)
def test_a_page_starts_with_a_command_and_ends_with_what_you_should_see(page):
    first = (DOCS / page).read_text().split("\n\n")[1]
    assert first.startswith(("    ", "```python\n"))
    assert ending(page)
    assert shown(page)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A directory with a cache of its own, in which commands run as the pages write them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        patch.setenv("SPHERET_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def command(page, program):
    """The words of the first command of a page that begins with these words."""
    text = (DOCS / page).read_text()
    return shlex.split(re.search(rf"^    spheret ({program}\b.*)$", text, re.MULTILINE).group(1), comments=True)


def replaced(words, **options):
    """The words with other values of their flags."""
    for name, value in options.items():
        words[words.index(f"--{name}") + 1] = value
    return words


@pytest.mark.slow
def test_train_from_scratch(here, capsys):
    words = replaced(command("train-from-scratch.md", "train --scheme"), steps="60")
    assert main([*words, *TINY, "--eval-every", "30"]) == 0
    printed = capsys.readouterr()
    assert not_printed("train-from-scratch.md", printed.out + printed.err) == []


def test_convert(here, capsys):
    assert main([*replaced(command("convert.md", "train"), steps="20"), "--quiet"]) == 0
    assert main(command("convert.md", "convert runs/small")) == 0
    assert not_printed("convert.md", capsys.readouterr().out) == []


def test_reproduce_the_paper(here, capsys):
    assert main(command("scale.md", "reproduce")) == 0
    assert not_printed("scale.md", capsys.readouterr().out) == []
