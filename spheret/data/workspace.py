"""The directory that a preparation writes to: locked to one process, resumable, and left clean after bad input."""

from __future__ import annotations

import re
from pathlib import Path

from spheret.data.manifest import MANIFESTS, PROGRESSES, Manifest, Progress, ResumePoint, SettingsRecord
from spheret.data.shards import COUNTS, MANIFEST, PROGRESS, TOKENIZER, read_manifest
from spheret.support.files import Lock, is_temporary, refuse_links, remove_empty

LOCK = "prepare.lock"
# settings that are hashes, which would tell a reader nothing: what to say when one differs
_HASHES = {"files": "the files have changed", "tokenizer_sha256": "the tokenizer has changed"}
# the files that a preparation writes
_WRITTEN = re.compile(
    rf"{re.escape(PROGRESS)}|{re.escape(TOKENIZER)}|{re.escape(COUNTS)}|{re.escape(MANIFEST)}"
    r"|(train|val)-\d{5}\.bin(\.part)?"
)


class Workspace:
    """A context that locks a directory. The directory may be missing, empty, or an earlier preparation."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # set once this process writes: after an error it may then remove what it wrote
        self.started = False
        # whether progress.json holds tokens to go on from
        self.resumable = False
        # whether this call goes on from the work of an earlier one
        self._continued = False
        self._created: Path | None = None
        self._lock = Lock(directory / LOCK)

    def __enter__(self) -> Workspace:
        path = self.directory
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"--out {path} is a file: give a directory.")
        self._refuse_other_files()
        # the topmost folder that is created here, so that a failure can remove it again
        self._created = next((p for p in (*reversed(path.parents), path) if not p.exists()), None)
        path.mkdir(parents=True, exist_ok=True)
        if not self._lock.acquire():
            raise BlockingIOError(f"another process is preparing into {path}: wait for it, or give another --out.")
        try:
            refuse_links(path, (entry.name for entry in path.iterdir() if _WRITTEN.fullmatch(entry.name)))
        except FileExistsError:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # bad input leaves nothing of this call behind; after a full disk, a lost network or Ctrl-C a later call can
        # go on. What an earlier call finished stays, whatever the error is
        if (
            self.started
            and error is not None
            and not self._continued
            and (isinstance(error, ValueError) or not self.resumable)
        ):
            self._discard()
        self._lock.release()
        if error is not None:
            remove_empty(self.directory, self._created)

    def _refuse_other_files(self) -> None:
        """Raise if the directory holds files of something else."""
        if not self.directory.is_dir():
            return
        names = {path.name for path in self.directory.iterdir() if not is_temporary(path)}
        if MANIFEST in names:
            read_manifest(self.directory)
            return
        # a preparation that was killed before its first note leaves no more than these
        if PROGRESS in names or names <= {LOCK}:
            return
        raise FileExistsError(
            f"--out {self.directory} holds other files ({sorted(names)[0]!r}) and no prepared data: give a new or "
            f"empty directory."
        )

    def manifest(self) -> Manifest | None:
        """Return the manifest of a finished preparation, or None if there is none."""
        return read_manifest(self.directory) if (self.directory / MANIFEST).exists() else None

    def progress(self, settings: SettingsRecord) -> Progress | None:
        """Return the last note of an unfinished preparation, or None. Raises if its settings differ."""
        try:
            note = PROGRESSES.read(self.directory / PROGRESS)
        except FileNotFoundError:
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
        self.resumable = self._continued = note.position is not None
        return note

    def forget(self) -> None:
        """Let an error remove what earlier calls wrote, too: it is of another text."""
        self._continued = False

    def record(self, settings: SettingsRecord, position: ResumePoint | None) -> None:
        """Note the progress, so that a later kill loses nothing of it."""
        PROGRESSES.write(self.directory / PROGRESS, Progress.of(settings, position))
        self.resumable = position is not None

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, which completes the directory, then remove the progress.

        Raises if the directory was moved or deleted meanwhile.
        """
        self._lock.check()
        MANIFESTS.write(self.directory / MANIFEST, manifest)
        self.tidy()

    def tidy(self) -> None:
        """Remove the files that only an unfinished preparation needs. A kill after the manifest leaves them."""
        (self.directory / PROGRESS).unlink(missing_ok=True)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        for path in self.directory.iterdir():
            if is_temporary(path):
                path.unlink()

    def _discard(self) -> None:
        """Remove everything that a preparation wrote."""
        for path in self.directory.iterdir():
            if _WRITTEN.fullmatch(path.name) or is_temporary(path):
                path.unlink()
