"""The project itself: what it needs, what it pins, what its command says."""

import re
import tomllib
from pathlib import Path

from spheret.cli import main
from spheret.support.errors import LAB, need_lab

ROOT = Path(__file__).parents[2]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def names(requirements):
    """The packages of a list of requirements, without spheret itself."""
    return {re.split(r"[><=\[; ]", requirement)[0] for requirement in requirements} - {"spheret"}


def requirements():
    return names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))


def test_the_core_needs_torch_and_numpy_and_the_commands_the_lab():
    assert names(PROJECT["dependencies"]) == {"torch", "numpy"}
    assert names(EXTRAS["lab"]) == set(LAB)
    # a kernel is of use without the commands
    assert {extra for extra in EXTRAS if "spheret[lab]" not in EXTRAS[extra]} == {"lab", "triton"}


def test_every_direct_dependency_is_pinned_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    apart = re.findall(r"--target \.venv/\w+ (.+)", (ROOT / "Makefile").read_text())
    assert len(apart) == 3
    # what builds a release comes from the index, too; setuptools is a requirement of the build itself
    release = re.findall(r"\$\(INSTALL\) (build .+) setuptools", (ROOT / "Makefile").read_text())
    assert len(release) == 1
    assert pinned == requirements() | set(" ".join([*apart, *release]).split())


def test_a_command_without_the_lab_names_the_command_that_installs_it(monkeypatch, capsys):
    need_lab()
    monkeypatch.setattr("spheret.support.errors.LAB", ("json", "no_such_module"))
    assert main(["race"]) == 2
    assert "spheret[lab]" in capsys.readouterr().err
