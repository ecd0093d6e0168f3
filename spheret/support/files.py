"""Files that are either complete or absent, JSON documents, and locks that end with their process."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
from filelock import FileLock, Timeout, lock_descriptor

# the numbers of a command are a few kilobytes
_MOST_NUMBERS = 1 << 26
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
# nobody writes one file for so many seconds: an unfinished one that is older was left by a kill
_ABANDONED = 24 * 3600


def sync_directory(directory: Path) -> None:
    """Flush a directory to disk, so that renames in it survive a power cut."""
    # Windows cannot open a directory
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of a file to what the system says while the file is read or written."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


class NotRegular(ValueError):
    """There is something other than a regular file of a bounded size."""


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path, flags: int = os.O_RDONLY, follow: bool = False) -> int:
    """A descriptor of a regular file. Raises NotRegular for anything else in its place, and waits for nothing.

    follow: whether the file may be reached by a link.
    """
    if not follow:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        # without O_NONBLOCK, opening a pipe waits for its other end
        handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and path.is_symlink():
            raise NotRegular(f"{path} is a link, not a file") from None
        # Windows denies the permission
        if error.errno in (errno.EISDIR, errno.EACCES) and path.is_dir():
            raise NotRegular(f"{path} is a directory, not a file") from None
        raise
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise NotRegular(f"{path} is {_KINDS.get(kind, 'something else')}, not a file")
    return handle


def read_regular(path: Path, most: int, follow: bool = False) -> bytes:
    """The bytes of a regular file, if it has at most `most` of them."""
    with naming(path), os.fdopen(open_regular(path, follow=follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise NotRegular(f"{path} has {size:,} bytes, and may have {most:,}")
        return file.read(most)


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write every byte to an unbuffered file, or raise."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def _temporary(path: Path) -> Path:
    """A name beside `path` that no one else has chosen and no one can guess."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether the name is one of ours for unfinished files. A kill leaves them behind."""
    return _TEMPORARY.fullmatch(path.name) is not None


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step: a crash at any moment leaves the old bytes or all of the new ones.

    A link in the place of the file is replaced, not followed.
    """
    temporary = _temporary(path)
    try:
        # "x" creates the file, and follows no link that has its name
        with naming(path), temporary.open("xb", buffering=0) as file:
            write_all(file, data)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _remove_abandoned(path)
    sync_directory(path.parent)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left of this file or directory more than a day ago. No link is followed."""
    for entry in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        # another process may remove it first
        with contextlib.suppress(OSError):
            if is_temporary(entry) and entry.lstat().st_mtime < time.time() - _ABANDONED:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def replaced(path: Path) -> IO[bytes]:
    """A new file in the place of an older one, open for writing. Whoever has the old one, by a link too, keeps it.

    Anything but a file in its place is an error.
    """
    try:
        os.close(open_regular(path))
        path.unlink()
    except FileNotFoundError:
        pass
    except NotRegular as error:
        raise ValueError(f"{error}, and would be written to: remove it, and run the same command again.") from None
    return path.open("xb")


@contextlib.contextmanager
def directory_written_whole(target: Path) -> Iterator[Path]:
    """A new directory, which takes the place of `target` (missing or empty) at the end of a block that succeeds."""
    output_path(target.parent, target.name)
    temporary = _temporary(target)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
        _remove_abandoned(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def output_path(directory: Path, *names: str) -> Path:
    """The path of a file or folder below an output directory. The folders that lead to it are made.

    Raises if it, or a folder below the directory that leads to it, is a link: writing through a link changes files
    elsewhere. The directory itself may be a link, because the user named it.
    """
    path = directory
    for part in Path(*names).parts:
        path.mkdir(parents=True, exist_ok=True)
        path = path / part
        if path.is_symlink():
            raise FileExistsError(
                f"{path} is a link, and nothing is written through links: put a file or folder there."
            )
    return path


def foreign(path: Path) -> FileExistsError:
    """The error for what another program, or the user, has put where a file of spheret belongs."""
    return FileExistsError(f"{path} was not written by spheret, and is not overwritten or removed: move it away.")


def is_result(content: bytes) -> bool:
    """Whether a file says that spheret wrote it: JSON with our format or with a command's numbers."""
    try:
        document = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    # a command's numbers name the command, and the version of spheret
    return str(document.get("format")).startswith("spheret-") or {"command", "spheret"} <= document.keys()


def check_results(flag: str, directory: Path, *names: str) -> None:
    """Raise if a command cannot write these files there, or if one of them is there and is not its own.

    A figure is its own if a document of it is there too.
    """
    check_output_directory(flag, directory)
    documents = [name for name in names if name.endswith(".json")]
    has_own = any((directory / name).exists() for name in documents)
    for name in names:
        check_output_file(flag, directory / name, is_result if name in documents else lambda content: has_own)


def check_output_file(flag: str, path: Path | None, is_ours: Callable[[bytes], bool] = is_result) -> None:
    """Raise if a command's result cannot be written there. It is asked before the work whose result goes there.

    A file that is there must hold such a result, or be empty.
    """
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{flag} {path} is a directory: give a file.")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{flag} {path} cannot be written: give another file.")
    check_output_directory(flag, path.parent)
    if not os.path.lexists(path):
        return
    try:
        content = read_regular(path, _MOST_NUMBERS)
    except NotRegular as error:
        raise ValueError(f"{flag}: {error}. Give another file.") from None
    if content and not is_ours(content):
        raise foreign(path)


def check_output_directory(flag: str, path: Path) -> None:
    """Raise if no file can be written into this directory, which may still be missing."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        lies = "is" if there == path else f"lies below {there}, which is"
        raise NotADirectoryError(f"{flag} {path} {lies} a file: give a directory.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{flag} {path} cannot be written: give another directory.")


def dump(value: Any) -> bytes:
    """Return a value as strict JSON, with null for NaN and infinity. Equal values give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=1) + b"\n"


def remove_empty(path: Path, topmost: Path | None) -> None:
    """Remove the folders from `path` up to `topmost` as long as they are empty. With None, remove nothing."""
    for folder in (path, *path.parents) if topmost is not None else ():
        try:
            folder.rmdir()
        except OSError:
            return
        if folder == topmost:
            return


class Lock:
    """An exclusive lock on a directory, held by one process. The system ends it with the process, even after kill -9.

    It is a lock on the file `path` in the directory, which is there while the lock is held.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # one lock for all threads; an error rather than a soft lock, which would outlive a killed process
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        self._file: os.stat_result | None = None

    def acquire(self) -> bool:
        """Take the lock. Returns False at once if it is held already, also if by this object."""
        while not self._lock.is_locked:
            # a lock file of ours is empty
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(self.path.lstat().st_mode) or self.path.lstat().st_size:
                    raise foreign(self.path)
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                # no file: the holder released the lock and removed the file during the attempt, so try again
                if self.path.exists():
                    return False
            else:
                self._file = self.path.stat()
                return True
        return False

    def _is_there(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(self._file, self.path.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Remove the file and release the lock. Nothing happens if the lock is not held."""
        if self._lock.is_locked:
            # removed while still locked, so that no other process loses a file that it has locked since
            with contextlib.suppress(PermissionError):
                if self._is_there():
                    self.path.unlink()
            self._lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock on this file."""
    # not by FileLock, which would create a missing file and needs to write to it
    try:
        with path.open("rb") as file:
            return not lock_descriptor(file.fileno(), blocking=False)
    except FileNotFoundError:
        return False
