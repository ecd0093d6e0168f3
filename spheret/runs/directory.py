"""The directory that a run is written to: locked to one process, and refused if it holds other files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spheret.data.shards import TOKENIZER
from spheret.runs import checkpoint
from spheret.runs.layout import CHECKPOINTS, CONFIG, EVAL, INSPECT, LOCK, METRICS, RUN_FILES, SAMPLE
from spheret.runs.records import RUNS
from spheret.runs.run import Run, open_run
from spheret.support.files import Lock, check_results, foreign, is_temporary, output_path, remove_empty


def existing(path: Path, resume: bool, force: bool) -> Run | None:
    """The run to continue, or None for a new run. Raises if the directory holds anything else."""
    if resume and force:
        raise ValueError("--resume continues a run and --force starts it again: give one of them.")
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"--out {path} is a file: give a directory.")
    names = {entry.name for entry in path.iterdir() if not is_temporary(entry)} if path.is_dir() else set()
    # after a kill while config.json was written; the lock file shows that tokenizer.json is ours
    if LOCK in names:
        names -= {LOCK} | ({TOKENIZER} if CONFIG not in names else set())
    if not names:
        return None
    if CONFIG not in names or not _is_ours(path / CONFIG):
        strangers = sorted(names - set(RUN_FILES)) or sorted(names)
        raise FileExistsError(f"--out {path} is not empty and not a run (it holds {strangers[0]!r}): give another.")
    return None if force else open_run(path)


def _is_ours(config: Path) -> bool:
    """Whether config.json belongs to a run: other models' directories have a file of that name too."""
    format = RUNS.format_of(config)
    return (config.parent / METRICS).exists() if format is None else format == RUNS.format


def _check_own(path: Path, whole: bool) -> None:
    """Raise if there is something that spheret did not write, or a link, in the place of a file of the run.

    whole: look at all that a removal of the run would remove.
    """
    for name in RUN_FILES:
        output_path(path, name)
    check_results("--out", path, SAMPLE)
    if whole:
        check_results("--out", path, EVAL)
        check_results("--out", path, INSPECT)
    for step in checkpoint.steps(path / CHECKPOINTS):
        checkpoint.check_own(path / CHECKPOINTS / f"step-{step}")
    for entry in (path / CHECKPOINTS).iterdir() if whole and (path / CHECKPOINTS).exists() else ():
        if not checkpoint.is_own_name(entry.name):
            raise foreign(entry)


@contextmanager
def claimed(path: Path, force: bool, start: bool = False) -> Iterator[None]:
    """Within the block the directory exists and is locked. `force` first removes the run in it.

    start: `existing` found no run, and there must still be none.
    """
    try:
        created = next((p for p in (*reversed(path.parents), path) if not p.exists()), None)
        path.mkdir(parents=True, exist_ok=True)
        lock = Lock(path / LOCK)
        free = lock.acquire()
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"cannot write to --out {path} ({error.strerror}): give a directory that can be.") from error
    if not free:
        raise BlockingIOError(f"another process is training in {path}: wait for it, or give another --out.")
    try:
        if start and not force and (path / CONFIG).exists():
            raise FileExistsError(f"another process started a run in {path} just now: give another --out.")
        _check_own(path, force)
        for name in RUN_FILES if force else ():
            target = path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        for entry in path.iterdir():
            # a kill left them
            if is_temporary(entry):
                entry.unlink()
        checkpoint.tidy(path / CHECKPOINTS)
        yield
    finally:
        lock.release()
        remove_empty(path, created)
