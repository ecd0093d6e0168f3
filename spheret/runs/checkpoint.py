"""Checkpoints: directories step-N, each whole or absent, and the search for the newest whole one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from spheret.runs import tensors
from spheret.runs.layout import MANIFEST, MODEL, OPTIMIZER, STATE
from spheret.runs.records import MANIFESTS, STATES, CheckpointRecord, FileRecord, StateRecord
from spheret.runs.tensors import Form, LazyTensor
from spheret.support import files

# as `save` spells them: no leading zeros, and no number without end
_NAME = re.compile(r"step-(0|[1-9]\d{0,14})")
_REMAINS = re.compile(rf"\.{_NAME.pattern}\.(new|old)")
FILES = (MODEL, OPTIMIZER, STATE, MANIFEST)


class Damaged(ValueError):
    """A checkpoint that is not what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint whose files match their SHA-256."""

    path: Path
    step: int
    state: StateRecord

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """The weights and their names, one at a time."""
        return tensors.each(self.path / MODEL)

    def optimizer(self) -> Iterator[tuple[str, Tensor]]:
        """The optimiser's state, under the names of the weights. Empty for weights that were not trained here."""
        path = self.path / OPTIMIZER
        return tensors.each(path) if path.exists() else iter(())


def save(directory: Path, parts: Mapping[str, Sequence[LazyTensor]], state: StateRecord) -> Path:
    """Write step-N. Files go to a temporary directory, each synced, the manifest last; then one rename."""
    # a run whose directory was moved or deleted meanwhile must not go on in a second one
    directory.mkdir(exist_ok=True)
    final, temporary = directory / f"step-{state.step}", directory / f".step-{state.step}.new"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        digests = {name: tensors.write(temporary / name, entries) for name, entries in parts.items()}
        digests[STATE] = hashlib.sha256(STATES.write(temporary / STATE, state)).hexdigest()
        entries = {
            name: FileRecord(bytes=(temporary / name).stat().st_size, sha256=digest)
            for name, digest in digests.items()
        }
        MANIFESTS.write(temporary / MANIFEST, CheckpointRecord.of(entries))
        # a damaged checkpoint of the same step is removed first
        discard(final)
        os.replace(temporary, final)
    except (OSError, ValueError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files.sync_directory(directory)
    return final


def check_own(path: Path) -> None:
    """Raise if there is something in the place of a checkpoint that `save` did not write, or in it."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise files.foreign(path)
    for entry in path.rglob("*"):
        if entry.parent != path or entry.name not in FILES:
            raise files.foreign(entry)


def discard(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no half of it is ever taken for a checkpoint."""
    check_own(path)
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        shutil.rmtree(old)


def tidy(directory: Path) -> None:
    """Remove the remains of saves and removals that a kill interrupted."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if _REMAINS.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def is_own_name(name: str) -> bool:
    """Whether a checkpoint, or the remains of one, has this name."""
    return bool(_NAME.fullmatch(name) or _REMAINS.fullmatch(name))


def steps(directory: Path) -> list[int]:
    """The steps that have a checkpoint, in order, whole or not."""
    names = (_NAME.fullmatch(path.name) for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(match[1]) for match in names if match)


def prune(directory: Path, keep: int, best: int | None) -> None:
    """Remove all but the last `keep` and the best."""
    for step in steps(directory)[:-keep]:
        # one to which somebody has added a file stays
        with contextlib.suppress(FileExistsError):
            if step != best:
                discard(directory / f"step-{step}")


def verify(path: Path) -> Checkpoint:
    """The checkpoint, after every byte was compared with its manifest. Raises Damaged otherwise."""
    try:
        if path.is_symlink():
            raise Damaged("it is a link")
        for name, expected in MANIFESTS.read(path / MANIFEST).files().items():
            with os.fdopen(files.open_regular(path / name), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.bytes:
                    raise Damaged(f"{name} has {size:,} bytes where {expected.bytes:,} were written")
                if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    raise Damaged(f"{name} does not match its SHA-256")
        state = STATES.read(path / STATE)
    except Damaged:
        raise
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise Damaged(f"{Path(error.filename or path).name} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise Damaged(str(error).rstrip(".")) from None
    if path.name != f"step-{state.step}":
        raise Damaged(f"{STATE} is of step {state.step}")
    return Checkpoint(path, state.step, state)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def newest(
    directory: Path, say: Callable[[str], object] = _say, check: Callable[[Checkpoint], object] = lambda saved: None
) -> Checkpoint | None:
    """The newest whole checkpoint, with a line for each damaged one; None if there is no checkpoint.

    check: called with a checkpoint whose files match their hashes; it may still raise Damaged.
    """
    saved_steps = steps(directory)
    for step in reversed(saved_steps):
        try:
            saved = verify(directory / f"step-{step}")
            check(saved)
            return saved
        except Damaged as error:
            say(f"checkpoint step-{step} is damaged, {error}: falling back to the one before.")
    if saved_steps:
        raise ValueError(f"every checkpoint in {directory} is damaged: copy one back, or start again with --force.")
    return None


def newest_state(directory: Path) -> Checkpoint | None:
    """The newest checkpoint whose state can be read. Its tensors are not looked at."""
    for step in reversed(steps(directory)):
        path = directory / f"step-{step}"
        with contextlib.suppress(ValueError, OSError):
            return Checkpoint(path, step, STATES.read(path / STATE))
    return None


def misfit(path: Path, wanted: Mapping[str, Form]) -> str | None:
    """How the tensors of a file differ from what a model needs, in name, dtype or shape; None if they fit."""
    saved = tensors.forms(path)
    rows = [f"{name} (missing)" for name in wanted if name not in saved]
    rows += [f"{name} (not in this model)" for name in saved if name not in wanted]
    rows += [
        f"{name} ({_differing(saved[name], wanted[name])})"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    return ", ".join(rows[:16]) + (f" and {len(rows) - 16} more" if len(rows) > 16 else "") if rows else None


def _differing(saved: Form, wanted: Form) -> str:
    """The two shapes, with their dtypes if those differ."""
    dtypes = saved[0] != wanted[0]
    return " for ".join(f"{dtype} {shape}" if dtypes else str(shape) for dtype, shape in (saved, wanted))


def check_tensors(saved: Checkpoint, wanted: Mapping[str, Mapping[str, Form]]) -> None:
    """Raise Damaged unless the tensors of each file are those that are wanted."""
    for name, entries in wanted.items():
        try:
            difference = misfit(saved.path / name, entries)
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except ValueError as error:
            raise Damaged(str(error).rstrip(".")) from None
        if difference is not None:
            raise Damaged(f"{name} does not fit the model; these differ: {difference}")


def check_fit(saved: Checkpoint, wanted: Mapping[str, Tensor]) -> None:
    """Raise an error that names the keys, unless the saved weights fit this model."""
    difference = misfit(saved.path / MODEL, {name: tensors.form(tensor) for name, tensor in wanted.items()})
    if difference is not None:
        raise ValueError(
            f"{saved.path} is of a different model; these differ: {difference}. Give the scheme and sizes it has."
        )
