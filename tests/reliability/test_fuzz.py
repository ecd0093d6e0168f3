"""Whatever is damaged: a command ends with the right result or with one sentence, and nothing that was whole is lost.

The cases are in fuzz.py. A seeded sample is quick; all of them are slow. `pytest -m slow -s
tests/reliability/test_fuzz.py` prints the counts.
"""

import random

import forked
import fuzz
import pytest

SAMPLE = 16


def made(root, race):
    """A stage in surroundings of its own."""
    with forked.surroundings(root / "cache"):
        stage = fuzz.Stage(root, race)
        yield stage
        stage.child.end()


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    yield from made(tmp_path_factory.mktemp("quick"), race=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    yield from made(tmp_path_factory.mktemp("whole"), race=True)


def test_a_sample(quick):
    quick_ones = [path for path in fuzz.DOCUMENTS if not path.startswith(fuzz.LONG)]
    keys = [case for path in quick_ones for case in quick.cases_of_keys(path)]
    long = tuple(name for folder in fuzz.LONG for name in fuzz.FOLDERS[folder])
    keys, files = ([c for c in cases if c.command not in long] for cases in (keys, quick.cases_of_files()))
    choose = random.Random(1337)
    wrong = forked.try_all(quick, [*choose.sample(keys, SAMPLE // 2), *choose.sample(files, SAMPLE // 2)])
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("path", fuzz.DOCUMENTS)
def test_every_key(path, whole):
    wrong = forked.try_all(whole, list(whole.cases_of_keys(path)))
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("folder", fuzz.FOLDERS)
def test_every_file(folder, whole):
    wrong = forked.try_all(whole, [case for case in whole.cases_of_files() if case.path.startswith(f"{folder}/")])
    assert not wrong, "\n".join(wrong[:5])
