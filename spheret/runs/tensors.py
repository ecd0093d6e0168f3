"""safetensors files, written tensor by tensor: the whole is never copied, and every byte is hashed on its way.

The library's own writer takes all tensors at once, which a sharded model cannot give without gathering everything.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.support import files

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class Entry:
    """A tensor by name, made when its turn comes: `make` returns it whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


def entry(name: str, tensor: Tensor) -> Entry:
    """An entry for a tensor that is already whole."""
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def header(entries: Sequence[Entry]) -> bytes:
    """The file's first bytes: a length, and JSON that says where every tensor lies."""
    described, start = {}, 0
    for item in entries:
        offsets = [start, start + item.size]
        described[item.name] = {"dtype": _NAMES[item.dtype], "shape": list(item.shape), "data_offsets": offsets}
        start += item.size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, entries: Sequence[Entry]) -> str:
    """Write a file that is on the disk when this returns, and say its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for part in _parts(entries):
            files.write_all(file, part)
            digest.update(part)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _parts(entries: Sequence[Entry]) -> Iterator[bytes | memoryview]:
    yield header(entries)
    for item in entries:
        tensor = item.make().detach().cpu().contiguous()
        if tuple(tensor.shape) != item.shape or tensor.dtype != item.dtype:
            raise ValueError(f"{item.name} was announced as {item.dtype} {item.shape}, and is {tensor.shape}.")
        if tensor.numel():
            # numpy has no bfloat16: bytes have no dtype
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, by name."""
    return dict(each(path))


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a file."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def each(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, one at a time."""
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        start = file.read(9)
    # a header's length may begin with the same byte, but then comes a brace
    if start[8:] != b"{" and (start[:2] == b"PK" or start[:1] == b"\x80"):
        raise ValueError(f"{path} is a pickle, not safetensors: loading one runs whatever is in it, so none is.")
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file ({error}).") from None
