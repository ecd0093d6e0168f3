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
import stat
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
# tried in this order, from the fastest to the most portable: some compilers have no OpenMP
FLAGS: tuple[tuple[str, ...], ...] = (
    ("-O3", "-march=native", "-fno-math-errno", "-fopenmp"),
    ("-O3", "-march=native", "-fno-math-errno"),
    ("-O3", "-fno-math-errno"),
)
if sys.platform == "darwin":
    # torch brings an OpenMP of its own there, and two of them in one process end it
    FLAGS = FLAGS[1:]
# the retractions that native.c has code for, as the numbers of its enum
KINDS = {"projection": 0, "cayley": 1, "angular": 2, "exponential": 3}
# rows per partial sum of dalpha and dp, as in native.c
CHUNK = 64
# larger results are written past the cache, because they would not stay there until they are read
STREAM_BYTES = 8 << 20
# below this size a second thread costs more time than it saves
PARALLEL_ELEMENTS = 1 << 15
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
DTYPES = tuple(_TYPES)


def _processor() -> str:
    """The processor's features, on which -march=native depends: machines may share one cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def compiler() -> list[str]:
    """The command of the C compiler, as a list: $CC, which may hold flags, or the first of cc, gcc and clang.

    Raises OSError if there is no such program, and on Windows.
    """
    # there GCC gives vectors places on the stack that are not aligned as its own instructions need it, and the owner
    # of a file that is going to be run is not known
    if not hasattr(os, "geteuid"):
        raise OSError("native.c is not built on Windows.")
    given = os.environ.get("CC", "")
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise OSError(f"CC={given} is no command ({error}).") from None
    if command:
        if shutil.which(command[0]) is None:
            raise OSError(f"there is no C compiler {command[0]!r}, which CC names.")
        return command
    path = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if path is None:
        raise OSError("there is no C compiler: install gcc or clang, or set CC.")
    return [path]


def _private_directory() -> Path:
    """The folder of this user's libraries. Nobody else can read or write it: what lies in it is run."""
    user = os.geteuid()
    path = cache_directory() / f"native-{user}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
        raise OSError(f"{path} is a link or belongs to another user: remove it, or set SPHERET_CACHE.")
    # whatever the umask was; a file system that is read-only is left alone
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def _is_sound(path: Path) -> bool:
    """Whether a library is a file of this user that nobody else can write, with the bytes that its name promises."""
    # no link is followed, and no pipe is waited for
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not (ours and stat.S_ISREG(found.st_mode)):
            return False
        return path.stem.endswith(hashlib.file_digest(file, "sha256").hexdigest())


def version(command: list[str]) -> str:
    """What a compiler says of itself."""
    said = subprocess.run(
        [*command, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    return said.stdout


def _build(command: list[str]) -> Path:
    """The path of the compiled library, built now unless the cache has it whole."""
    made_with = version(command) + " ".join(command[1:])
    parts = [repr(SOURCE.read_bytes()), made_with, repr(FLAGS), platform.machine(), _processor()]
    key = hashlib.sha256("\0".join(parts).encode())
    folder, start = _private_directory(), key.hexdigest()[:24]
    damaged = False
    # the name says what the library is made of and what it holds: it needs no second file that could be torn off
    for library in sorted(folder.glob(f"{start}-*.so")):
        try:
            if _is_sound(library):
                return library
            library.unlink()
        except OSError:
            # another process has removed it first, or it is a link or a folder
            pass
        damaged = True
    name = Path(command[0]).name
    if damaged:
        print(f"spheret: the native kernel in {folder} is damaged, compiling it again with {name}", file=sys.stderr)
    else:
        print(f"spheret: compiling the native kernel with {name}, once", file=sys.stderr)
    message = ""
    # each process builds its own file and renames it atomically, so several processes may build at once
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "native.so"
        for flags in FLAGS:
            run = subprocess.run(
                [*command, *flags, "-shared", "-fPIC", str(SOURCE), "-o", str(built), "-lm"],
                # the compiler's own files stay in the cache
                env={**os.environ, "TMPDIR": scratch},
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
            if run.returncode == 0:
                built.chmod(0o600)
                library = folder / f"{start}-{hashlib.sha256(built.read_bytes()).hexdigest()}.so"
                os.replace(built, library)
                return library
            message = run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit code {run.returncode}"
    raise RuntimeError(f"{' '.join(command)} could not build {SOURCE.name}: {message}")


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why it could not be built; tried once per process."""
    try:
        library = ctypes.CDLL(str(_build(compiler())))
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
    """Whether the library could be loaded; torch.compile may call this while it traces."""
    return not isinstance(_load(), str)


@functools.cache
def _function(name: str, *dtypes: torch.dtype) -> Any:
    """The C function of that name for rows of these dtypes."""
    return getattr(_load(), "_".join([name, *(_TYPES[dtype] for dtype in dtypes)]))


def unsuited(h: Tensor, f: Tensor, row: Retraction, p: P) -> str | None:
    """The reason why the native kernel cannot take such a call, or None if it can."""
    if h.device.type != "cpu" or f.device.type != "cpu":
        return f"it runs on the CPU, and the rows are on {h.device} and {f.device}."
    return fused.unsuited(h, f, row, p, DTYPES, KINDS)


def missing() -> str | None:
    """The reason why this machine has no native kernel, or None if it has one."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """CPU memory for C to write to, independent of torch's default dtype and device."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _threads(elements: int) -> int:
    return 1 if elements < PARALLEL_ELEMENTS else torch.get_num_threads()


def _stream(h: Tensor) -> bool:
    return h.numel() * h.element_size() >= STREAM_BYTES


def _shared(h: Tensor, alpha: P, p: P, kind: str, cap: float | None) -> tuple[tuple[Any, ...], Tensor | None]:
    """The last arguments of both C functions, and the tensor of steps that they point to if each row has its own."""
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
        # a learned p may reach infinity
        kind = "exponential"
    pointer, limit = None if steps is None else steps.data_ptr(), math.inf if cap is None else cap
    return (n, d, step, pointer, KINDS[kind], number, limit, _threads(n * d), _stream(h)), steps


def forward(h: Tensor, f: Tensor, alpha: P, p: P, kind: str, cap: float | None) -> tuple[Tensor, Tensor]:
    """The next state of contiguous rows, and |h|^2, <h,f>, |z|^2 of each row as (n, 3) float32."""
    rest, _steps = _shared(h, alpha, p, kind, cap)
    out, kept = torch.empty_like(h), _empty(rest[0], 3)
    _function("forward", h.dtype, f.dtype)(h.data_ptr(), f.data_ptr(), out.data_ptr(), kept.data_ptr(), *rest)
    return out, kept


def backward(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, kind: str, cap: float | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh, df, and dalpha and dp in float32: dalpha has one value, or one per row; dp has one value."""
    rest, steps = _shared(h, alpha, p, kind, cap)
    dh, df = torch.empty_like(h), torch.empty_like(f)
    partial = _empty((rest[0] + CHUNK - 1) // CHUNK, 2, dtype=torch.float64)
    dalpha = _empty(*((1,) if not isinstance(alpha, Tensor) else alpha.shape if steps is None else steps.shape))
    dp = _empty(*(p.shape if isinstance(p, Tensor) else (1,)))
    tensors = (g, h, f, kept, dh, df, dalpha, dp, partial)
    _function("backward", h.dtype, f.dtype)(*(t.data_ptr() for t in tensors), *rest)
    return dh, df, dalpha, dp


def _norm_shared(h: Tensor, radius: P) -> tuple[Any, ...]:
    n, d = h.numel() // h.shape[-1], h.shape[-1]
    return (n, d, radius.item() if isinstance(radius, Tensor) else radius, _threads(n * d), _stream(h))


def norm_forward(h: Tensor, radius: P) -> tuple[Tensor, Tensor]:
    """radius h/|h| of contiguous rows, and |h|^2 of each row."""
    rest = _norm_shared(h, radius)
    out, kept = torch.empty_like(h), _empty(rest[0])
    _function("norm_forward", h.dtype)(h.data_ptr(), out.data_ptr(), kept.data_ptr(), *rest)
    return out, kept


def norm_backward(g: Tensor, h: Tensor, radius: P, kept: Tensor) -> tuple[Tensor, Tensor]:
    """dh, and dradius in the shape of radius."""
    rest = _norm_shared(h, radius)
    dh, dradius = torch.empty_like(h), _empty(*(radius.shape if isinstance(radius, Tensor) else (1,)))
    partial = _empty((rest[0] + CHUNK - 1) // CHUNK, dtype=torch.float64)
    _function("norm_backward", h.dtype)(*(t.data_ptr() for t in (g, h, kept, dh, dradius, partial)), *rest)
    return dh, dradius


KERNEL = Fused("native", forward, backward, norm_forward, norm_backward)
