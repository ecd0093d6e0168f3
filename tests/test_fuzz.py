"""Whatever is damaged: a command ends with the right result or with one sentence, and nothing that was whole is lost.

The cases are in fuzz.py. A seeded sample is quick; all of them are slow. `pytest -m slow -s tests/test_fuzz.py`
prints the counts.
"""

import random

import fuzz
import pytest
import torch

SAMPLE = 16


def made(root, race):
    """A stage with a cache of its own. A fork has none of the other threads, so that there is one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPHERET_CACHE", str(root / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        stage = fuzz.Stage(root, race)
        yield stage
        stage.child.end()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    yield from made(tmp_path_factory.mktemp("quick"), race=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    yield from made(tmp_path_factory.mktemp("whole"), race=True)


def test_a_sample(quick):
    keys = [case for path in fuzz.DOCUMENTS if path[:4] != "race" for case in quick.cases_of_keys(path)]
    keys, files = ([c for c in cases if c.command != "race"] for cases in (keys, quick.cases_of_files()))
    choose = random.Random(1337)
    wrong = fuzz.try_all(quick, [*choose.sample(keys, SAMPLE // 2), *choose.sample(files, SAMPLE // 2)])
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("path", fuzz.DOCUMENTS)
def test_every_key(path, whole):
    wrong = fuzz.try_all(whole, list(whole.cases_of_keys(path)))
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("folder", fuzz.FOLDERS)
def test_every_file(folder, whole):
    wrong = fuzz.try_all(whole, [case for case in whole.cases_of_files() if case.path.startswith(f"{folder}/")])
    assert not wrong, "\n".join(wrong[:5])
