"""safetensors files, written tensor by tensor and hashed while they are written.

The library's own writer takes all tensors at once. A sharded model would have to gather everything for that.
"""

from __future__ import annotations

import hashlib
import json
import math
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
class LazyTensor:
    """A named tensor that is gathered when it is written: `gather` returns the whole of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    gather: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


def lazy_tensor(name: str, tensor: Tensor) -> LazyTensor:
    """A tensor that is already whole."""
    return LazyTensor(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def header(tensors: Sequence[LazyTensor]) -> bytes:
    """The file's first bytes: a length, and JSON with the place of every tensor."""
    described, start = {}, 0
    for item in tensors:
        offsets = [start, start + item.size]
        described[item.name] = {"dtype": _NAMES[item.dtype], "shape": list(item.shape), "data_offsets": offsets}
        start += item.size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, tensors: Sequence[LazyTensor]) -> str:
    """Write a file and return its SHA-256. The file is on the disk when this returns."""
    digest = hashlib.sha256()
    with files.naming(path), path.open("wb", buffering=0) as file:
        for part in _parts(tensors):
            files.write_all(file, part)
            digest.update(part)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _parts(tensors: Sequence[LazyTensor]) -> Iterator[bytes | memoryview]:
    yield header(tensors)
    for item in tensors:
        tensor = item.gather().detach().cpu().contiguous()
        if tuple(tensor.shape) != item.shape or tensor.dtype != item.dtype:
            raise ValueError(f"{item.name} should be {item.dtype} {item.shape}, and is {tensor.shape}.")
        if tensor.numel():
            # numpy has no bfloat16: bytes have no dtype
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


# a tensor's dtype as the file spells it, and its shape
Form = tuple[str, tuple[int, ...]]


def form(tensor: Tensor) -> Form:
    """The form that a tensor would have in a file."""
    return _NAMES[tensor.dtype], tuple(tensor.shape)


def forms(path: Path) -> dict[str, Form]:
    """The form of every tensor of a file."""
    with _opened(path) as file:
        parts = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts}


def each(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, one at a time, mapped into memory."""
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    # safe_open follows links, and waits for a pipe
    os.close(files.open_regular(path))
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}): copy or save it again.") from None
