"""The command line's last line of defence: one sentence and an exit code for every exception."""

import subprocess
import sys
import types

import pytest

from spheret import __version__, cli

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
    assert "'sqrt'" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_mistake_in_our_own_code_is_internal(command):
    # int() is called by a line of spheret, but no raise statement of spheret raised the error
    assert command(lambda: cli.importlib.import_module("spheret.bounds").inverse_softplus("x")) == 1


def test_the_system_and_lack_of_memory_have_their_own_sentences(command, capsys, tmp_path):
    assert command(lambda: (tmp_path / "nothing").read_bytes()) == 2
    sentence = capsys.readouterr().err
    assert f"{tmp_path / 'nothing'}: No such file" in sentence
    assert command(lambda: bytearray(1 << 62)) == 2
    assert "out of memory" in capsys.readouterr().err


def test_without_a_place_for_the_trace_it_is_printed(command, capsys, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert command(lambda: {}["key"]) == 1
    assert "KeyError: 'key'" in capsys.readouterr().err


def shell(words):
    """Run a line of bash in which `spheret` is this one."""
    line = f'spheret() {{ {sys.executable} -m spheret "$@"; }}; {words}'
    return subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("output", "codes"), [("> /dev/full", [2]), ("| head -1; exit ${PIPESTATUS[0]}", [0, 141]), (">&-", [0])]
)
def test_an_output_that_takes_no_more(output, codes):
    """A full disk is one sentence. A reader that goes away, and an output that was closed, are no errors."""
    done = shell(f"spheret schemes {output}")
    assert done.returncode in codes
    if codes == [2]:
        assert "No space" in done.stderr
    assert done.stderr.count("\n") == (codes == [2])


def test_errors_that_cannot_be_printed_leave_the_exit_code():
    assert shell("spheret sample run --count 0 2> /dev/full").returncode == 2


def test_a_sentence_stays_on_one_line(capsys):
    assert cli.main(["sample", "a\nb"]) == 2
    assert capsys.readouterr().err.startswith("spheret sample: no run directory at a b")


def test_the_version_and_the_help(capsys):
    assert shell("spheret --version").stdout == f"spheret {__version__}\n"
    for words in ([], ["--help"]):
        assert cli.main(words) == 0
        assert capsys.readouterr().out.count("  spheret ") == len(cli.COMMANDS)
