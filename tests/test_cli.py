"""The command line's last line of defence: one sentence and an exit code for every exception."""

import subprocess
import sys
import types

import pytest

from spheret import cli

SURPRISES = [
    KeyError("step"),
    TypeError("unhashable"),
    AttributeError("no such"),
    OverflowError("too large"),
    ZeroDivisionError("division by zero"),
    EOFError("no bytes"),
    RecursionError("maximum recursion depth exceeded"),
    # an exception that a library raises is not our sentence, whatever its type
    ValueError("Corrupt snappy compressed data."),
    RuntimeError("[enforce fail at x.cpp] .\nframe #0: c10::Error"),
]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run a command that calls a function; returns the exit code."""
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))

    def run(function):
        module = types.ModuleType("surprising")
        module.command = lambda: function()
        monkeypatch.setitem(sys.modules, "surprising", module)
        monkeypatch.setitem(cli.COMMANDS, "surprise", ("surprising:command", "raises"))
        return cli.main(["surprise"])

    return run


@pytest.mark.parametrize("error", SURPRISES, ids=lambda error: type(error).__name__)
def test_a_surprise_is_one_sentence_and_a_trace_in_the_cache(error, command, capsys, tmp_path):
    def function():
        raise error

    assert command(function) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("spheret surprise: internal error, ")
    assert printed.count("\n") == 1
    (trace,) = (tmp_path / "cache" / "errors").iterdir()
    assert str(trace) in printed
    assert "in function" in trace.read_text()


def test_a_sentence_of_ours_is_printed_as_it_is(command, capsys, tmp_path):
    assert command(lambda: cli.importlib.import_module("spheret.schedules").factor("sqr", 1)) == 2
    assert capsys.readouterr().err.startswith("spheret surprise: unknown schedule 'sqr'. Did you mean 'sqrt'?")
    assert not (tmp_path / "cache").exists()


def test_a_mistake_in_our_own_code_is_internal(command):
    # int() is called by a line of spheret, but no raise statement of spheret raised the error
    assert command(lambda: cli.importlib.import_module("spheret.bounds").inverse_softplus("x")) == 1


def test_the_system_and_lack_of_memory_have_their_own_sentences(command, capsys, tmp_path):
    assert command(lambda: (tmp_path / "nothing").read_bytes()) == 2
    sentence = capsys.readouterr().err
    assert f"the system says of {tmp_path / 'nothing'}: No such file or directory. Mend that" in sentence
    assert command(lambda: bytearray(1 << 62)) == 2
    assert "out of memory" in capsys.readouterr().err


def test_without_a_place_for_the_trace_it_is_printed(command, capsys, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert command(lambda: {}["key"]) == 1
    assert "KeyError: 'key'" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m spheret retractions | true; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def shell(words):
    """Run a line of bash in which `spheret` is this one."""
    line = f'spheret() {{ {sys.executable} -m spheret "$@"; }}; {words}'
    return subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True)


@pytest.mark.parametrize("words", ["--help", "--version", "retractions", "plan --help"])
def test_a_full_disk_under_the_output_is_one_sentence(words):
    done = shell(f"spheret {words} > /dev/full")
    assert done.returncode == 2
    prog = {"plan --help": "spheret plan", "retractions": "spheret retractions"}.get(words, "spheret")
    remedy = "Mend that, and run the same command again."
    assert done.stderr == f"{prog}: the system says: No space left on device. {remedy}\n"


@pytest.mark.parametrize("words", ["--help", "plan --help", "retractions"])
def test_a_reader_that_reads_one_line_is_no_error(words):
    done = shell(f"spheret {words} | head -1; exit ${{PIPESTATUS[0]}}")
    assert done.returncode in (0, 141)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize("words", ["--help", "plan --help", "retractions"])
def test_an_output_that_was_closed_is_no_error(words):
    done = shell(f"spheret {words} >&-")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_errors_that_cannot_be_printed_leave_the_exit_code():
    assert shell("spheret plan --gpus 0 2> /dev/full").returncode == 2


PARSED = [
    (["plan", "--gpus", "two"], "--gpus"),
    (["plan", "--gpus", "9" * 5000], "--gpus"),
    (["plan", "--utilisation", "half"], "--utilisation"),
    (["plan", "--gpus"], "--gpus"),
    # what was meant is named
    (["plan", "--gqus", "2"], "--gpus"),
    (["sample"], "run directory"),
    (["plan", "--scheme", "x" * 5000], "unknown scheme"),
    (["sample", "a\nb"], "no run directory at a b: make one"),
    (["sample", "\udcff"], "'\\udcff' is not UTF-8: give a name that is."),
    (["sample", "~no-user-of-this-name/run"], "a path begins with ~ and the name of no user of this machine"),
]


@pytest.mark.parametrize(("words", "fact"), PARSED, ids=[" ".join(words)[:30] for words, _ in PARSED])
def test_words_that_are_not_understood_end_in_one_sentence(words, fact, capsys):
    assert cli.main(words) == 2
    printed = capsys.readouterr().err
    assert fact in printed
    # above it stands what tyro says of flags
    last = printed.splitlines()[-1]
    assert last.startswith(f"spheret {words[0]}: ")
    assert len(last) < 1500


def test_an_unknown_command_is_one_sentence(capsys):
    assert cli.main(["plann"]) == 2
    assert capsys.readouterr().err.startswith("spheret: unknown command 'plann'. Did you mean 'plan'?")
