"""A checkpoint is whole or absent, wherever the process dies and whatever the disk does."""

import errno
import os
import signal
import sys

import damage
import pytest
import torch

from spheret.runs import checkpoint
from spheret.runs.checkpoint import MANIFEST, MODEL, OPTIMIZER, STATE
from spheret.runs.records import StateRecord
from spheret.runs.tensors import lazy_tensor
from spheret.support import files

FILES = (MODEL, OPTIMIZER, STATE, MANIFEST)


def save(directory, step):
    parts = {
        MODEL: [lazy_tensor("w", torch.full((5,), float(step))), lazy_tensor("v", torch.zeros(2, 2))],
        OPTIMIZER: [lazy_tensor("w.exp_avg", torch.full((5,), -float(step)))],
    }
    return checkpoint.save(directory, parts, StateRecord(step=step, val_loss=float(step), training=None))


def test_what_was_saved_is_loaded(tmp_path):
    save(tmp_path, 10)
    saved = checkpoint.newest(tmp_path)
    assert (saved.step, saved.state.val_loss) == (10, 10)
    assert dict(saved.model())["w"].tolist() == [10.0] * 5
    assert dict(saved.optimizer())["w.exp_avg"].tolist() == [-10.0] * 5
    assert sorted(p.name for p in (tmp_path / "step-10").iterdir()) == sorted(FILES)


def test_none_and_the_newest(tmp_path):
    assert checkpoint.newest(tmp_path / "nowhere") is None
    for step in (2, 10, 9):
        save(tmp_path, step)
    assert checkpoint.steps(tmp_path) == [2, 9, 10]
    assert checkpoint.newest(tmp_path).step == 10


DAMAGE = {"flipped": damage.FLIPPED, **damage.FILES}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_one_is_passed_over_aloud(tmp_path, name, what):
    save(tmp_path, 1)
    DAMAGE[what](save(tmp_path, 2) / name)
    assert_passed_over(tmp_path)
    # and the next save of that step takes its place, once nothing else lies in it
    for other in (tmp_path / "step-2").glob("the-target-of-a-link"):
        with pytest.raises(FileExistsError, match=other.name):
            save(tmp_path, 2)
        other.unlink()
    save(tmp_path, 2)
    assert checkpoint.newest(tmp_path, pytest.fail).step == 2


def assert_passed_over(directory):
    messages = []
    assert checkpoint.newest(directory, messages.append).step == 1
    assert len(messages) == 1
    assert "step-2" in messages[0]
    assert "\n" not in messages[0]


@pytest.mark.parametrize("what", ["file", "link", "notes.txt", "notes/model.safetensors"])
def test_something_else_in_the_place_of_a_checkpoint_stays(tmp_path, what):
    save(tmp_path, 1)
    saved = save(tmp_path, 2)
    if what in ("file", "link"):
        saved.rename(tmp_path / "elsewhere")
        saved.touch() if what == "file" else saved.symlink_to(tmp_path / "elsewhere")
    else:
        (saved / what).parent.mkdir(exist_ok=True)
        (saved / what).write_text("mine")
    before = damage.contents(tmp_path)
    with pytest.raises(FileExistsError, match=what.split("/")[0] if "notes" in what else "step-2"):
        save(tmp_path, 2)
    for step in (3, 4):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 1, best=None)
    assert checkpoint.steps(tmp_path) == [2, 4]
    after = damage.contents(tmp_path)
    assert {name: after.get(name) for name in before if "step-1" not in name} == {
        name: data for name, data in before.items() if "step-1" not in name
    }


def test_a_checkpoint_under_another_name(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 3).rename(tmp_path / "step-2")
    assert_passed_over(tmp_path)
    for name in ("step-007", "step-" + "9" * 200, "step-9x", "step-"):
        (tmp_path / name).mkdir()
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_all_damaged_is_an_error(tmp_path):
    damage.FLIPPED(save(tmp_path, 1) / MODEL)
    with pytest.raises(ValueError, match="every checkpoint"):
        checkpoint.newest(tmp_path, lambda text: None)


def test_prune_keeps_the_last_and_the_best(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2, best=3)
    assert checkpoint.steps(tmp_path) == [3, 5, 6]


def in_child(work, after):
    """Run `work` in a forked child that kills itself after so many lines of the code under test; True if it did."""
    child = os.fork()
    if child == 0:
        left = after
        watched = (checkpoint.__file__, files.__file__, sys.modules["spheret.runs.tensors"].__file__)

        def trace(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename not in watched or frame.f_code.co_name in ("header", "size", "dump"):
                return None
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


# at every nineteenth line; the slow suite takes every line
@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_between_any_two_lines_of_a_save(tmp_path, stride):
    moment, died = 0, True
    while died:
        directory = tmp_path / str(moment)
        save(directory, 1)
        save(directory, 2)

        def work(directory=directory):
            save(directory, 3)
            checkpoint.prune(directory, 1, best=None)

        died = in_child(work, moment)
        saved = checkpoint.newest(directory, pytest.fail)
        assert saved.step in (2, 3)
        assert dict(saved.model())["w"].tolist() == [float(saved.step)] * 5
        # and the next process can go on from there
        checkpoint.tidy(directory)
        save(directory, 3)
        checkpoint.prune(directory, 1, best=None)
        assert [p.name for p in directory.iterdir()] == ["step-3"]
        moment += stride
    # lines, file operations among them, and each was a place to die
    assert moment > 100


@pytest.mark.parametrize("short", [False, True])
def test_a_full_disk_leaves_the_last_one(tmp_path, monkeypatch, short):
    save(tmp_path, 1)
    real, failures = files.write_all, 0
    for allowed in range(100):
        left = allowed

        def full(file, data):
            nonlocal left
            left -= 1
            if left < 0:
                if short:
                    real(file, memoryview(data).cast("B")[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            real(file, data)

        with monkeypatch.context() as patch:
            patch.setattr(files, "write_all", full)
            try:
                save(tmp_path, 2)
                break
            except OSError:
                pass
        failures += 1
        assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert failures > 6
    assert checkpoint.newest(tmp_path).step == 2


def test_the_differing_keys_are_named(tmp_path):
    save(tmp_path, 1)
    wanted = {"w": torch.zeros(4), "c": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"c .*v .*w \(\(5,\) for \(4,\)\)"):
        checkpoint.check_fit(checkpoint.newest(tmp_path), wanted)
