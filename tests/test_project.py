"""The project itself: what it needs, what it pins, what its command says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import spheret
from spheret.cli import main
from spheret.support.errors import need

ROOT = Path(__file__).parent.parent


def requirements():
    text = (ROOT / "pyproject.toml").read_text()
    names = re.findall(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    names += re.findall(
        r"^\w+ = \[(.*?)\]", text.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M | re.S
    )
    return {re.split(r"[><=\[; ]", name)[0] for group in names for name in re.findall(r'"([^"]+)"', group)}


def test_every_direct_dependency_is_pinned_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    apart = re.search(r"--target \.venv/timm (.+)", (ROOT / "Makefile").read_text())
    assert pinned == requirements() | set(apart.group(1).split())


def test_importing_needs_only_torch():
    optional = requirements() - {"torch"}
    modules = {name.replace("-", "_") for name in optional}
    # numpy is torch's own business: torch runs without it, and takes it when it is there
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules - {"numpy"}!r}:
            raise ImportError("not here: " + name)
sys.meta_path.insert(0, Refuse())
import spheret
spheret.scheme("proj-spheretnorm").connect(4, 1, 2)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_names_the_command():
    with pytest.raises(ImportError, match=r'pip install "spheret\[hub\]"'):
        need("no_such_module", "hub")


class TestCommandLine:
    def test_version(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"spheret {spheret.__version__}\n"

    def test_help(self, capsys):
        assert main([]) == 0
        assert "deep connections" in capsys.readouterr().out

    def test_unknown_command(self, capsys):
        assert main(["trian"]) == 2
        assert "unknown command 'trian'" in capsys.readouterr().err

    def test_as_a_module(self):
        run = subprocess.run(
            [sys.executable, "-m", "spheret", "--version"], check=True, capture_output=True, text=True
        )
        assert run.stdout.strip() == f"spheret {spheret.__version__}"
