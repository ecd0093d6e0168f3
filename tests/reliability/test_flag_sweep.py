"""Every flag of every command: work that is done, or one sentence, and nobody's files touched.

The cases are in flag_sweep.py. A seeded sample is quick; all of them are slow. `pytest -m slow -s
tests/reliability/test_flag_sweep.py` prints the counts.
"""

import random

import flag_sweep
import forked
import pytest

from spheret.cli import COMMANDS

SAMPLE = 24
# commands that import no more than torch, and that need no race and no export
QUICK = ("prepare", "train", "sample", "report", "plan", "reproduce")


def made(root, whole):
    """A stage in surroundings of its own."""
    with forked.surroundings(root / "cache"):
        stage = flag_sweep.Stage(root, whole)
        yield stage
        stage.child.end()


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    yield from made(tmp_path_factory.mktemp("quick"), whole=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    yield from made(tmp_path_factory.mktemp("whole"), whole=True)


def test_every_command_has_a_base():
    assert {base.command for base in flag_sweep.BASES} == set(COMMANDS)


def test_a_flag_that_is_new_is_swept():
    names = {flag.name for flag in flag_sweep.flags("reproduce")}
    assert {"--ignore-memory", "--no-ignore-memory", "--nproc", "--data"} <= names
    assert [flag.place for flag in flag_sweep.flags("inspect") if not flag.name] == [0, 1]
    kinds = {flag.name: flag.kind for flag in flag_sweep.flags("train")}
    assert (kinds["--lr"], kinds["--steps"], kinds["--out"], kinds["--quiet"]) == ("FLOAT", "INT", "TEXT", "SWITCH")


def test_a_sample(quick):
    bases = [base for base in flag_sweep.BASES if base.command in QUICK]
    cases = [case for base in bases for case in flag_sweep.cases(base)]
    wrong = forked.try_all(quick, random.Random(1337).sample(cases, SAMPLE))
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("base", flag_sweep.BASES, ids=lambda base: base.command)
def test_every_flag(base, whole):
    wrong = forked.try_all(whole, list(flag_sweep.cases(base)))
    assert not wrong, "\n".join(wrong[:5])
