"""A current directory that holds files with the names of modules, as a downloaded corpus may."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

NAMES = ("json", "numpy", "torch", "tyro", "spheret", "tiktoken", "socket", "multiprocessing", "sitecustomize")


def plant(directory: Path) -> Path:
    """Write them into a new directory. Returns the file in which each leaves its name if it runs."""
    directory.mkdir(parents=True)
    ran = directory.with_name(directory.name + "-ran")
    for name in NAMES:
        (directory / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name} ')\nraise SystemExit(99)\n")
    return ran


@contextlib.contextmanager
def planted(directory: Path) -> Iterator[None]:
    """Go to such a directory. What is done there must run none of the files, in no process that it starts."""
    ran = plant(directory)
    with contextlib.chdir(directory):
        yield
    assert not ran.exists(), ran.read_text()
