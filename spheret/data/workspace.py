"""The directory that a preparation writes: locked to one process, resumable, and left clean when input is bad."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from spheret.data.shards import COUNTS, FORMAT, MANIFEST, TOKENIZER, read_manifest
from spheret.support.files import Lock, dump, remove_empty, write_atomically

PROGRESS = "progress.json"
LOCK = "prepare.lock"
_OURS = re.compile(
    rf"({re.escape(PROGRESS)}|{re.escape(TOKENIZER)}|{re.escape(COUNTS)}|{re.escape(MANIFEST)})(\.tmp)?"
    r"|(train|val)-\d{5}\.bin(\.part)?"
)


class Workspace:
    """A context that holds the lock of a directory which is empty, missing, or a preparation of the same thing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # set once this process writes: what it wrote is then its own to take away
        self.started = False
        # whether the last note holds tokens to go on from
        self.resumable = False
        self._created: Path | None = None
        self._lock = Lock(directory / LOCK)

    def __enter__(self) -> Workspace:
        path = self.directory
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"--out {path} is a file: give a directory.")
        self._refuse_strangers()
        # the topmost folder that is made here, so that a failure can take it away again
        self._created = next((p for p in (*reversed(path.parents), path) if not p.exists()), None)
        path.mkdir(parents=True, exist_ok=True)
        if not self._lock.acquire():
            raise BlockingIOError(f"another process is preparing into {path}: wait for it, or give another --out.")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # bad input leaves nothing behind; a full disk, a lost network or Ctrl-C leaves whole work to go on from
        if self.started and error is not None and (isinstance(error, ValueError) or not self.resumable):
            self._discard()
        self._lock.release()
        if error is not None:
            remove_empty(self.directory, self._created)

    def _refuse_strangers(self) -> None:
        """Raise if the directory holds files that no preparation wrote."""
        if not self.directory.is_dir():
            return
        names = {path.name for path in self.directory.iterdir()}
        if MANIFEST in names:
            read_manifest(self.directory)
            return
        # killed before its first note, it left no more than these
        if PROGRESS in names or names <= {LOCK, f"{PROGRESS}.tmp"}:
            return
        raise FileExistsError(
            f"--out {self.directory} is not empty and not ours (it holds {sorted(names)[0]!r}): give a new or "
            f"empty directory."
        )

    def manifest(self) -> dict[str, Any] | None:
        """What a finished preparation left here."""
        return read_manifest(self.directory) if (self.directory / MANIFEST).exists() else None

    def progress(self, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
        """Where a killed preparation of the same thing had got to."""
        path = self.directory / PROGRESS
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise FileExistsError(f"{path} is damaged ({error}): delete {self.directory} and start again.") from None
        if found.get("format") != FORMAT or found["fingerprint"] != fingerprint:
            old = found.get("fingerprint", {})
            changed = ", ".join(key for key in fingerprint if old.get(key) != fingerprint[key])
            raise FileExistsError(
                f"{self.directory} holds an unfinished preparation of something else ({changed} differs): run that "
                f"command again to finish it, give another --out, or delete it."
            )
        self.resumable = "cursor" in found
        return found

    def record(self, fingerprint: dict[str, Any], state: dict[str, Any]) -> None:
        """Note how far the work is, so that a kill after this loses nothing before it."""
        write_atomically(self.directory / PROGRESS, dump({"format": FORMAT, "fingerprint": fingerprint, **state}))
        self.resumable = "cursor" in state

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, which makes the directory whole, then forget the progress."""
        write_atomically(self.directory / MANIFEST, dump(manifest))
        self.tidy()

    def tidy(self) -> None:
        """Remove what only an unfinished preparation needs, as a kill after the manifest leaves it."""
        for name in (PROGRESS, f"{PROGRESS}.tmp"):
            (self.directory / name).unlink(missing_ok=True)

    def _discard(self) -> None:
        for path in self.directory.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()
