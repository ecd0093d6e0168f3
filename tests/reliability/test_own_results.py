"""A command overwrites what it wrote itself, and nothing of somebody else's. Logs and leftovers alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import TINY, randomize

from spheret import GPT, GPTConfig
from spheret.cli import main
from spheret.data.tokenizers import describe, load
from spheret.runs.run import create_run
from spheret.support import files
from spheret.support.child import Child, python_environment, spheret_command
from spheret.support.figure_style import axes_grid, own_style, render

PNG = render("a", "a figure", axes_grid()[0]).png
LEFT = ".name.0123456789abcdef.tmp"
# what a command writes, and its words
RESULTS = {
    "inspect": ["inspect", "run"],
    "certificate": ["certify", "run"],
    "initialisation": ["certify", "--schemes", "pre-ln", "--layers", "2", "--width", "8", "--out", "run"],
    "coord-check": [
        "coord-check", "--widths", "8,16", "--layers", "2,4", "--steps", "1", "--seeds", "1", "--batch-size", "1",
        "--block", "4", "--out", "run",
    ],
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create_run("run", randomize(GPT(GPTConfig(**{**TINY, "vocab": 257}))), describe(load("bytes")))
    return tmp_path / "run"


FOREIGN = {"json": b'{"inspected": ["my car"], "command": "wash"}', "png": PNG}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("ending", FOREIGN)
def test_files_of_others_stay(name, ending, run, capsys):
    path = run / f"{name}.{ending}"
    path.write_bytes(FOREIGN[ending])
    assert main(RESULTS[name]) == 2
    assert f"{path.name} was not written by spheret" in capsys.readouterr().err
    assert path.read_bytes() == FOREIGN[ending]
    path.unlink()
    path.symlink_to("/dev/null")
    assert main(RESULTS[name]) == 2
    assert "is a link, not a file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["initialisation", "coord-check"])
def test_own_files_may_be_written_again(name, run):
    assert main(RESULTS[name]) == 0
    for ending in FOREIGN:
        assert files.is_result((run / f"{name}.{ending}").read_bytes())
        files.check_results("--out", run, f"{name}.{ending}")


def test_a_marked_figure_is_the_same_figure(tmp_path):
    from matplotlib.image import imread

    (tmp_path / "plain.png").write_bytes(PNG)
    files.write_figure(tmp_path / "marked.png", PNG)
    assert not files.is_result(PNG)
    assert files.is_result((tmp_path / "marked.png").read_bytes())
    assert (imread(tmp_path / "plain.png") == imread(tmp_path / "marked.png")).all()


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_no_log_is_written_through_something_else(kind, tmp_path):
    log, other = tmp_path / "log", tmp_path / "other"
    other.write_text("precious")
    {"link": lambda: log.symlink_to(other), "pipe": lambda: os.mkfifo(log), "directory": log.mkdir}[kind]()
    with pytest.raises(ValueError, match=f"log is a {kind}, not a file"):
        Child(["--version"], log)
    assert other.read_text() == "precious"


def test_an_old_log_is_replaced_and_not_emptied(tmp_path):
    """A hard link has no other end that one could refuse."""
    log, other = tmp_path / "log", tmp_path / "other"
    other.write_text("precious")
    log.hardlink_to(other)
    with files.replaced(log) as file:
        file.write(b"new")
    assert (log.read_text(), other.read_text()) == ("new", "precious")


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    """A kill leaves temporary files. Whoever writes the same file next removes them, unless someone still writes."""
    dead, alive, foreign = (tmp_path / LEFT.replace("0", digit) for digit in "012")
    dead.write_text("half")
    foreign.symlink_to(tmp_path / "elsewhere")
    others = [tmp_path / name for name in (".other.0123456789abcdef.tmp", ".name.tmp", "name.tmp")]
    for path in others:
        path.touch()
    with alive.open("x") as file:
        files.lock_descriptor(file.fileno())
        files.write_atomically(tmp_path / "name", b"whole")
        assert not dead.exists()
        assert alive.exists()
    files.write_atomically(tmp_path / "name", b"whole")
    assert not alive.exists()
    assert foreign.is_symlink()
    assert all(path.exists() for path in others)


def test_leftovers_of_directories_go(tmp_path):
    (tmp_path / LEFT).mkdir()
    (tmp_path / LEFT / "model.safetensors").touch()
    with files.directory_written_whole(tmp_path / "name") as partial:
        (partial / "a").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["name"]


def test_settings_of_matplotlib_do_not_matter():
    import matplotlib

    def drawn():
        with own_style():
            return render("a", "a", axes_grid()[0]).svg

    plain = drawn()
    with matplotlib.rc_context({"lines.linewidth": 9, "figure.facecolor": "red", "axes.titlesize": 40}):
        assert drawn() == plain


# the surroundings of a process: the code that comes first, the environment, and what is said
SURROUNDINGS = {
    "no such user": ("", {"SPHERET_CACHE": "~nobody-of-this-name/x"}, 2, "the name of no user"),
    "no current directory": ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", {}, 2, "directory is gone"),
    "a pipe of matplotlib's": ("os.mkfifo('matplotlibrc')", {}, 0, ""),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name, tmp_path):
    first, environment, code, sentence = SURROUNDINGS[name]
    script = f"import os, sys; {first or 'pass'}; sys.argv[1:] = ['schemes']; from spheret.cli import main; "
    script += "code = main(); code or __import__('matplotlib'); sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert "internal error" not in done.stderr
    assert "Traceback" not in done.stderr
    assert sentence in done.stderr


def test_a_locale_without_letters_beyond_ascii(tmp_path):
    """The same bytes as in any other locale."""
    (tmp_path / "texts").mkdir()
    for name in ("ä.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text("Schöne Sphären, überall. " * 99, encoding="utf-8")
    commands = {
        "explorer.html": ["explore", "--out"],
        "data": ["prepare", "texts", "--tokenizer", "bytes", "--val-fraction", "0.5", "--workers", "1", "--out"],
    }
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for place, locale in (("plain", {"LC_ALL": "C.UTF-8"}), ("ascii", ascii_only)):
        (tmp_path / place).mkdir()
        for out, words in commands.items():
            done = subprocess.run(
                spheret_command([*words, f"{place}/{out}"]),
                cwd=tmp_path,
                env={**python_environment(), "PYTHONUTF8": "1", **locale},
                capture_output=True,
            )
            assert done.returncode == 0, done.stderr
    files = [path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        assert (tmp_path / "plain" / path).read_bytes() == (tmp_path / "ascii" / path).read_bytes(), path


def test_an_open_quote_is_no_compiler(monkeypatch):
    from spheret.kernels import native

    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(OSError, match="is no command"):
        native.compiler()
