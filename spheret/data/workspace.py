"""The directory that a preparation writes to: locked to one process, resumable, and left clean after bad input."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spheret.data.manifest import MANIFESTS, PROGRESSES, Manifest, Progress, ResumePoint, SettingsRecord
from spheret.data.shards import COUNTS, MANIFEST, PROGRESS, TOKENIZER, is_shard, read_manifest
from spheret.support.files import Lock, foreign, is_temporary, remove_empty

LOCK = "prepare.lock"
# settings that are hashes, which would tell a reader nothing: what to say when one differs
_HASHES = {"files": "the files have changed", "tokenizer_sha256": "the tokenizer has changed"}


class Workspace:
    """A context that locks a directory. The directory may be missing, empty, or an earlier preparation."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # whether progress.json holds tokens to go on from
        self.resumable = False
        # whether everything here is this call's own, so that bad input removes it
        self.fresh = False
        self._created: Path | None = None
        self._lock = Lock(directory / LOCK)

    def __enter__(self) -> Workspace:
        path = self.directory
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"--out {path} is a file: give a directory.")
        names = {entry.name for entry in path.iterdir() if not is_temporary(entry)} if path.exists() else set()
        # a preparation that was killed before its first note leaves its lock
        if names - {LOCK} and not names & {MANIFEST, PROGRESS}:
            raise FileExistsError(
                f"--out {path} holds other files ({min(names)!r}) and no prepared data: give a new or empty "
                f"directory."
            )
        # the topmost folder that is created here, so that a failure can remove it again
        self._created = next((p for p in (*reversed(path.parents), path) if not p.exists()), None)
        path.mkdir(parents=True, exist_ok=True)
        if not self._lock.acquire():
            raise BlockingIOError(f"another process is preparing into {path}: wait for it, or give another --out.")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # bad input leaves nothing of this call behind; after a full disk, a lost network or Ctrl-C a later call can
        # go on. What an earlier call finished stays, whatever the error is
        if self.fresh and error is not None and (isinstance(error, ValueError) or not self.resumable):
            written = (PROGRESS, TOKENIZER, COUNTS, MANIFEST)
            self._remove(path for path in self.directory.iterdir() if path.name in written or is_shard(path.name))
            self.tidy()
        self._lock.release()
        if error is not None:
            remove_empty(self.directory, self._created)

    def manifest(self) -> Manifest | None:
        """Return the manifest of a finished preparation, or None if there is none."""
        return read_manifest(self.directory) if (self.directory / MANIFEST).exists() else None

    def begin(self, settings: SettingsRecord) -> ResumePoint | None:
        """Return where an unfinished preparation resumes, or None at the start. Raises if its settings differ."""
        try:
            note = PROGRESSES.read(self.directory / PROGRESS)
        except FileNotFoundError:
            self.fresh = True
            self.record(settings, None)
            return None
        differences = [
            _HASHES.get(key, f"{key} {noted!r}, not {value!r}")
            for key in SettingsRecord.__struct_fields__
            if (noted := getattr(note.settings, key)) != (value := getattr(settings, key))
        ]
        if differences:
            raise FileExistsError(
                f"{self.directory} holds an unfinished preparation with other settings ({'; '.join(differences)}): "
                f"run that command again to finish it, give another --out, or delete it."
            )
        self.resumable = note.position is not None
        self.fresh = not self.resumable
        return note.position

    def record(self, settings: SettingsRecord, position: ResumePoint | None) -> None:
        """Note the progress, so that a later kill loses nothing of it."""
        # first, so that Ctrl-C within the write removes nothing
        self.resumable = position is not None
        PROGRESSES.write(self.directory / PROGRESS, Progress(settings=settings, position=position))

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, which completes the directory, then remove the progress."""
        MANIFESTS.write(self.directory / MANIFEST, manifest)
        self.tidy()

    def tidy(self) -> None:
        """Remove the files that only an unfinished preparation needs. A kill after the manifest leaves them."""
        note = self.directory / PROGRESS
        if note.exists() and PROGRESSES.format_of(note) != PROGRESSES.format:
            raise foreign(note)
        self._remove(path for path in self.directory.iterdir() if path.name == PROGRESS or is_temporary(path))

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in list(paths):
            path.unlink()
