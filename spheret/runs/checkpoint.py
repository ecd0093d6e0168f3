"""Checkpoints: directories step-N, each whole or absent, and the search for the newest whole one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from spheret.runs import tensors
from spheret.runs.layout import MANIFEST, MODEL, OPTIMIZER, STATE
from spheret.runs.tensors import LazyTensor
from spheret.support import files

_NAME = re.compile(r"step-(\d+)")


class Damaged(ValueError):
    """A checkpoint that is not what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint whose files match their SHA-256."""

    path: Path
    step: int
    state: dict[str, Any]

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """The weights and their names, one at a time."""
        return tensors.each(self.path / MODEL)

    def optimizer(self) -> Iterator[tuple[str, Tensor]]:
        """The optimiser's state, under the names of the weights. Empty for weights that were not trained here."""
        path = self.path / OPTIMIZER
        return tensors.each(path) if path.exists() else iter(())


def save(directory: Path, step: int, parts: Mapping[str, Sequence[LazyTensor]], state: dict[str, Any]) -> Path:
    """Write step-N. Files go to a temporary directory, each synced, the manifest last; then one rename."""
    directory.mkdir(parents=True, exist_ok=True)
    final, temporary = directory / f"step-{step}", directory / f".step-{step}.new"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        digests = {name: tensors.write(temporary / name, entries) for name, entries in parts.items()}
        data = files.dump({"step": step, **state})
        files.write_atomically(temporary / STATE, data)
        digests[STATE] = hashlib.sha256(data).hexdigest()
        manifest = {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": digest} for name, digest in digests.items()
        }
        files.write_atomically(temporary / MANIFEST, files.dump(manifest))
        # a damaged checkpoint of the same step is removed first
        discard(final)
        os.rename(temporary, final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files.sync_directory(directory)
    return final


def discard(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no half of it is ever taken for a checkpoint."""
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        shutil.rmtree(old)


def tidy(directory: Path) -> None:
    """Remove the remains of saves and removals that a kill interrupted."""
    for path in directory.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def steps(directory: Path) -> list[int]:
    """The steps that have a checkpoint, in order, whole or not."""
    names = (_NAME.fullmatch(path.name) for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(match[1]) for match in names if match)


def prune(directory: Path, keep: int, best: int | None) -> None:
    """Remove all but the last `keep` and the best."""
    for step in steps(directory)[:-keep]:
        if step != best:
            discard(directory / f"step-{step}")


def verify(path: Path) -> Checkpoint:
    """The checkpoint, after every byte was compared with its manifest. Raises Damaged otherwise."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        for name, expected in manifest.items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise Damaged(f"{name} has {size:,} bytes where {expected['bytes']:,} were written")
            with (path / name).open("rb") as file:
                if _sha256(file) != expected["sha256"]:
                    raise Damaged(f"{name} does not match its SHA-256")
        if not {MODEL, STATE} <= manifest.keys():
            raise Damaged(f"{MANIFEST} names no {MODEL} or {STATE}")
        state = json.loads((path / STATE).read_bytes())
        return Checkpoint(path, int(state["step"]), state)
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"its JSON is damaged ({error})") from None


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 24):
        digest.update(block)
    return digest.hexdigest()


def newest(directory: Path, say: Callable[[str], object] = warnings.warn) -> Checkpoint | None:
    """The newest whole checkpoint, with a warning for each damaged one; None if there is no checkpoint."""
    saved_steps = steps(directory)
    for step in reversed(saved_steps):
        try:
            return verify(directory / f"step-{step}")
        except Damaged as error:
            say(f"checkpoint step-{step} is damaged, {error}: falling back to the one before.")
    if saved_steps:
        raise ValueError(f"every checkpoint in {directory} is damaged: copy one back, or start again with --force.")
    return None


def differing(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Why saved tensors do not fit: names that are missing, left over, or of another shape."""
    rows = [f"{name} (missing)" for name in wanted if name not in saved]
    rows += [f"{name} (not in this model)" for name in saved if name not in wanted]
    rows += [
        f"{name} ({saved[name]} for {wanted[name]})"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    return rows


def check_fit(saved: Checkpoint, wanted: Mapping[str, Tensor]) -> None:
    """Raise an error that names the keys, unless the saved weights fit this model."""
    path = saved.path
    rows = differing(tensors.shapes(path / MODEL), {name: tuple(tensor.shape) for name, tensor in wanted.items()})
    if rows:
        shown = ", ".join(rows[:16]) + (f" and {len(rows) - 16} more" if len(rows) > 16 else "")
        raise ValueError(f"{path} is of another model; these differ: {shown}. Give the scheme and sizes it has.")
