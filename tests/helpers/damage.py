"""Every way to damage a document, key by key and as a file. Tests of readers and of commands walk over it."""

from __future__ import annotations

import copy
import json
import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# a place inside a document: the keys and indices that lead to it
Place = tuple[str | int, ...]

# what to put in a place. Each is written as Python's json writes it, so that NaN is the word NaN
VALUES: dict[str, Any] = {
    "null": None,
    "word": "word",
    "empty word": "",
    "number": 7.5,
    "negative": -1,
    "negative fraction": -0.5,
    "zero": 0,
    "huge": 10**400,
    "large": 1 << 70,
    "NaN": math.nan,
    "infinity": math.inf,
    "true": True,
    "list": [],
    "table": {},
    "list of itself": [[[[]]]],
    "long word": "word" * 1000,
}


def places(document: Any, start: Place = ()) -> Iterator[Place]:
    """Every place in a document below its top. Of a list only the first and the last item are walked into."""
    if isinstance(document, dict):
        steps: list[str | int] = list(document)
    else:
        steps = sorted({0, len(document) - 1}) if isinstance(document, list) and document else []
    for step in steps:
        place = (*start, step)
        yield place
        yield from places(document[step], place)


def changed(document: Any, place: Place, change: Callable[[Any, Any], None]) -> Any:
    """A document after change(parent, key) at a place. It shares what is elsewhere."""
    step, *rest = place
    result = copy.copy(document)
    if rest:
        result[step] = changed(document[step], tuple(rest), change)
    else:
        change(result, step)
    return result


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Within the block the kernel refuses files of more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def overwrite(path: Path, content: bytes) -> None:
    """Put this in the place of what a file holds. Some file systems wait for the disk if a file is emptied first."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def _delete(parent: Any, key: Any) -> None:
    del parent[key]


def _put(value: Any) -> Callable[[Any, Any], None]:
    def put(parent: Any, key: Any) -> None:
        parent[key] = value

    return put


def damages(document: Any) -> Iterator[tuple[str, Place, Any]]:
    """Every change of a document: what was done, where, and the document that results."""
    for place in places(document):
        yield "missing", place, changed(document, place, _delete)
        for name, value in VALUES.items():
            yield name, place, changed(document, place, _put(value))
        if isinstance(place[-1], str):
            yield "unknown key", place, changed(document, (*place[:-1], "unheard_of"), _put(1))


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def _link(path: Path) -> None:
    target = path.with_name("the-target-of-a-link")
    path.rename(target)
    path.symlink_to(target)


def _grow(path: Path) -> None:
    # a hole, which takes no room on the disk
    os.truncate(path, 1 << 32)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# what can happen to a file; a flipped bit may leave a valid document, so it is apart
FILES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "bytes": lambda path: path.write_bytes(b"\x00\xff\xfe" * 100),
    "grown": _grow,
    "nested": lambda path: path.write_bytes(b'{"format":' * 100_000),
    "nested lists": lambda path: path.write_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "list": lambda path: path.write_bytes(b"[]"),
    "null": lambda path: path.write_bytes(b"null"),
    "twice": lambda path: path.write_bytes(path.read_bytes() * 2),
    "directory": _replaced(Path.mkdir),
    "link": _link,
    "link to itself": _replaced(lambda path: path.symlink_to(path)),
    "pipe": _replaced(os.mkfifo),
    "device": _replaced(lambda path: path.symlink_to("/dev/zero")),
}
FLIPPED: Callable[[Path], object] = _flip


def dump(document: Any) -> str:
    """A damaged document as text: also if it is not JSON."""
    return json.dumps(document)
