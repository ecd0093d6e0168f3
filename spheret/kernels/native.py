"""The CPU kernel: native.c, compiled at first use with the machine's own compiler, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.kernels import fused
from spheret.kernels.fused import Fused
from spheret.retractions import P, Retraction
from spheret.support.autograd import constant_when_traced
from spheret.support.cache import cache_directory

SOURCE = Path(__file__).with_name("native.c")
# from the fastest to the most modest: no OpenMP where the compiler has none
FLAGS = (
    ("-O3", "-march=native", "-fno-math-errno", "-fopenmp"),
    ("-O3", "-march=native", "-fno-math-errno"),
    ("-O3", "-fno-math-errno"),
)
KINDS = {"projection": 0, "cayley": 1, "angular": 2, "exponential": 3}
CHUNK = 64
# results larger than this are written past the cache: nothing would find them there again
STREAM_BYTES = 8 << 20
# below this a second thread costs more than it does
PARALLEL_ELEMENTS = 1 << 15
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
DTYPES = tuple(_TYPES)


def _processor() -> str:
    """What -march=native depends on: a cache on a shared home directory serves several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def _compiler() -> list[str]:
    """The words that call the compiler: $CC, which may hold flags, or the first that is found."""
    given = shlex.split(os.environ.get("CC", ""))
    if given:
        if shutil.which(given[0]) is None:
            raise OSError(f"there is no C compiler {given[0]!r}, which CC names.")
        return given
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise OSError("there is no C compiler: install gcc or clang, or set CC.")
    return [found]


def _build(compiler: list[str]) -> Path:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    version += " ".join(compiler[1:])
    source = SOURCE.read_bytes()
    key = hashlib.sha256("\0".join([repr(source), version, repr(FLAGS), platform.machine(), _processor()]).encode())
    library = cache_directory() / "native" / f"{key.hexdigest()[:24]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    print(f"spheret: compiling the native kernel with {Path(compiler[0]).name}, once", file=sys.stderr)
    said = ""
    # each process builds its own file; the rename is atomic, so the last of several is as good as the first
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / "native.so"
        for flags in FLAGS:
            run = subprocess.run(
                [*compiler, *flags, "-shared", "-fPIC", str(SOURCE), "-o", str(made), "-lm"],
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode == 0:
                os.replace(made, library)
                return library
            said = run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit code {run.returncode}"
    raise RuntimeError(f"{' '.join(compiler)} could not build {SOURCE.name}: {said}")


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or a sentence that says why there is none; tried once a process."""
    try:
        library = ctypes.CDLL(str(_build(_compiler())))
    except (OSError, RuntimeError) as error:
        return f"it could not be built: {error}"
    pointer, integer, real, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_double, ctypes.c_int64
    rest = [size, size, real, pointer, integer, real, real, integer, integer]
    signatures = {
        f"{name}_{h}_{f}": [pointer] * pointers + rest
        for name, pointers in (("forward", 4), ("backward", 9))
        for h in _TYPES.values()
        for f in _TYPES.values()
    } | {
        f"norm_{name}_{h}": [pointer] * pointers + [size, size, real, integer, integer]
        for name, pointers in (("forward", 3), ("backward", 6))
        for h in _TYPES.values()
    }
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


@constant_when_traced
def ready() -> bool:
    """Whether the library is there, as torch.compile may ask while it traces."""
    return not isinstance(_load(), str)


@functools.cache
def _function(name: str, *dtypes: torch.dtype) -> Any:
    """The C function of that name for rows of these dtypes."""
    return getattr(_load(), "_".join([name, *(_TYPES[dtype] for dtype in dtypes)]))


def unsuited(h: Tensor, f: Tensor, row: Retraction, p: P) -> str | None:
    """Why the native kernel is not for such a call; None: it is."""
    if h.device.type != "cpu" or f.device.type != "cpu":
        return f"it runs on the CPU, and the rows are on {h.device} and {f.device}."
    return fused.unsuited(h, f, row, p, DTYPES, KINDS)


def missing() -> str | None:
    """Why there is no native kernel on this machine; None: there is."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def _room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for C to write to, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _threads(elements: int) -> int:
    return 1 if elements < PARALLEL_ELEMENTS else torch.get_num_threads()


def _stream(h: Tensor) -> bool:
    return h.numel() * h.element_size() >= STREAM_BYTES


def _shared(h: Tensor, alpha: P, p: P, kind: str, cap: float | None) -> tuple[tuple[Any, ...], Tensor | None]:
    """The arguments that both passes end with, as C takes them, and the steps they point to, if a row has its own."""
    n, d = h.numel() // h.shape[-1], h.shape[-1]
    steps = None
    if not isinstance(alpha, Tensor):
        step = alpha
    elif alpha.numel() == 1:
        step = alpha.item()
    else:
        step, steps = 0.0, alpha.detach().float().expand(*h.shape[:-1], 1).contiguous()
    number = p.item() if isinstance(p, Tensor) else p
    if math.isinf(number):
        # a learned p may get there
        kind = "exponential"
    pointer, limit = None if steps is None else steps.data_ptr(), math.inf if cap is None else cap
    return (n, d, step, pointer, KINDS[kind], number, limit, _threads(n * d), _stream(h)), steps


def forward(h: Tensor, f: Tensor, alpha: P, p: P, kind: str, cap: float | None) -> tuple[Tensor, Tensor]:
    """The next state of contiguous rows, and |h|^2, <h,f>, |z|^2 of each row as (n, 3) float32."""
    rest, _steps = _shared(h, alpha, p, kind, cap)
    out, kept = torch.empty_like(h), _room(rest[0], 3)
    _function("forward", h.dtype, f.dtype)(h.data_ptr(), f.data_ptr(), out.data_ptr(), kept.data_ptr(), *rest)
    return out, kept


def backward(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, kind: str, cap: float | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh, df, and dalpha and dp in float32: one value in the shape it has there, or dalpha a value a row."""
    rest, steps = _shared(h, alpha, p, kind, cap)
    dh, df = torch.empty_like(h), torch.empty_like(f)
    partial = _room((rest[0] + CHUNK - 1) // CHUNK, 2, dtype=torch.float64)
    dalpha = _room(*((1,) if not isinstance(alpha, Tensor) else alpha.shape if steps is None else steps.shape))
    dp = _room(*(p.shape if isinstance(p, Tensor) else (1,)))
    tensors = (g, h, f, kept, dh, df, dalpha, dp, partial)
    _function("backward", h.dtype, f.dtype)(*(t.data_ptr() for t in tensors), *rest)
    return dh, df, dalpha, dp


def _norm_shared(h: Tensor, radius: P) -> tuple[Any, ...]:
    n, d = h.numel() // h.shape[-1], h.shape[-1]
    return (n, d, radius.item() if isinstance(radius, Tensor) else radius, _threads(n * d), _stream(h))


def norm_forward(h: Tensor, radius: P) -> tuple[Tensor, Tensor]:
    """radius h/|h| of contiguous rows, and |h|^2 of each row."""
    rest = _norm_shared(h, radius)
    out, kept = torch.empty_like(h), _room(rest[0])
    _function("norm_forward", h.dtype)(h.data_ptr(), out.data_ptr(), kept.data_ptr(), *rest)
    return out, kept


def norm_backward(g: Tensor, h: Tensor, radius: P, kept: Tensor) -> tuple[Tensor, Tensor]:
    """dh, and dradius in the shape of radius."""
    rest = _norm_shared(h, radius)
    dh, dradius = torch.empty_like(h), _room(*(radius.shape if isinstance(radius, Tensor) else (1,)))
    partial = _room((rest[0] + CHUNK - 1) // CHUNK, dtype=torch.float64)
    _function("norm_backward", h.dtype)(*(t.data_ptr() for t in (g, h, kept, dh, dradius, partial)), *rest)
    return dh, dradius


KERNEL = Fused("native", forward, backward, norm_forward, norm_backward)
