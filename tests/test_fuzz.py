"""Whatever is damaged: a command ends with the right result or with one sentence, and nothing that was whole is lost.

The cases are in fuzz.py. A seeded sample is quick; all of them are slow. `pytest -m slow -s tests/test_fuzz.py`
prints the counts.
"""

import random

import fuzz
import pytest
import torch

SAMPLE = 40


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    threads = torch.get_num_threads()
    # a fork has none of the other threads
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPHERET_CACHE", str(root / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield fuzz.Stage(root)
    torch.set_num_threads(threads)


def all_cases(stage):
    return [case for path in fuzz.DOCUMENTS for case in stage.cases_of_keys(path)] + list(stage.cases_of_files())


def test_a_sample(stage):
    cases = random.Random(1337).sample(all_cases(stage), SAMPLE)
    wrong = fuzz.try_all(stage, cases)
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("path", fuzz.DOCUMENTS)
def test_every_key(path, stage):
    wrong = fuzz.try_all(stage, list(stage.cases_of_keys(path)))
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["run", "race", "data", "unfinished"])
def test_every_file(folder, stage):
    cases = [case for case in stage.cases_of_files() if case.path.startswith(f"{folder}/")]
    wrong = fuzz.try_all(stage, cases)
    assert not wrong, "\n".join(wrong[:5])
