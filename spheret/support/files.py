"""Files that are whole or absent, whatever happens meanwhile, and locks that a dead process cannot hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any


def sync_directory(directory: Path) -> None:
    """Make renames in a directory last through a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write every byte to an unbuffered file, or raise."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def write_atomically(path: Path, data: bytes) -> None:
    """The file holds the old bytes or all of the new ones, whatever happens meanwhile."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            write_all(file, data)
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def dump(value: Any) -> bytes:
    """JSON that is the same bytes for the same value."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_document(path: Path, kind: str, version: int, command: str, again: str) -> dict[str, Any]:
    """A JSON object that `spheret COMMAND` wrote, of this format and version; `again` says what to do otherwise."""
    try:
        found = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}): {again}.") from None
    if not isinstance(found, dict) or found.get("format") != kind:
        raise ValueError(f"{path} was not written by spheret {command}: point at what was, or {again}.")
    if found.get("version") != version:
        raise ValueError(
            f"{path} has format version {found.get('version')!r}, this spheret reads {version}: {again}, or use the "
            f"spheret that wrote it."
        )
    return found


def remove_empty(path: Path, made: Path | None) -> None:
    """Take away the folders from `path` up to `made`, unless something is in them; nothing where none was made."""
    for each in (path, *path.parents) if made is not None else ():
        try:
            each.rmdir()
        except OSError:
            return
        if each == made:
            return


class Lock:
    """The system's own lock (flock) on a file: it ends with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Take the lock, or return False at once if another process has it."""
        import fcntl

        while True:
            file = self.path.open("ab", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            # whoever held it may have finished and removed the file between the two calls
            if self.path.exists() and os.fstat(file.fileno()).st_ino == self.path.stat().st_ino:
                self._file = file
                return True
            file.close()

    def release(self) -> None:
        """Remove the file and let go; nothing happens if it is not held."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock on this file."""
    import fcntl

    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
