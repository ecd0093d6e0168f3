"""Files are complete or absent, documents are checked when they are read, and locks end with their process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spheret.support import files
from spheret.support.files import Lock, is_locked, write_atomically

HOLD = """
import sys, pathlib
from spheret.support.files import Lock
lock = Lock(pathlib.Path(sys.argv[1]))
print(lock.acquire(), flush=True)
sys.stdin.read()
"""


def _holder(path: Path) -> subprocess.Popen[str]:
    """A process that tries to take the lock and then waits."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_lock_is_one_process_s_and_ends_with_it_however_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    process = _holder(path)
    try:
        assert _answer(process) == "True"
        assert is_locked(path)
        assert not Lock(path).acquire()
        second = _holder(path)
        assert _answer(second) == "False"
        second.communicate("")
        # neither the question nor the refusal took the lock away
        assert is_locked(path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    # the file stays and tells that something was begun here; the lock does not
    assert path.exists()
    assert not is_locked(path)
    lock = Lock(path)
    assert lock.acquire()
    lock.release()


def test_a_file_that_is_removed_on_release_lets_no_two_in(tmp_path: Path) -> None:
    inside, most, taken = 0, 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most, taken
        for _ in range(200):
            lock = Lock(tmp_path / "run.lock")
            if not lock.acquire():
                continue
            with guard:
                inside, taken = inside + 1, taken + 1
                most = max(most, inside)
            with guard:
                inside -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken > 10


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def broken(file: object, data: bytes) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(files, "write_all", broken)
    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_link_is_replaced_and_a_guessed_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    for name in ("document.json", "document.json.tmp", ".document.json.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "document.json", b"{}")
    assert (tmp_path / "document.json").read_bytes() == b"{}"
    assert not (tmp_path / "document.json").is_symlink()
    assert victim.read_text() == "untouched"


def test_a_directory_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "own").write_text("a user's")

    def fail() -> None:
        with files.directory_written_whole(tmp_path / "out") as partial:
            (partial / "half").write_text("")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with files.directory_written_whole(tmp_path / "out") as partial:
        (partial / "whole").write_text("")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["out", "out.part", "own", "whole"]


def test_no_folder_below_an_output_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    # the user may name a link
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    out = tmp_path / "out"
    assert files.output_path(out, "runs", "one") == out / "runs" / "one"
    assert (out / "runs").is_dir()
    assert not (out / "runs" / "one").exists()
    (out / "figures").symlink_to(tmp_path)
    (out / "runs" / "two").symlink_to(tmp_path / "missing")
    for names in (("figures",), ("figures/loss.png",), ("runs", "two"), ("runs/two/config.json",)):
        with pytest.raises(FileExistsError, match="link"):
            files.output_path(out, *names)
    with pytest.raises(FileExistsError, match="link"), files.directory_written_whole(out / "figures"):
        pass
