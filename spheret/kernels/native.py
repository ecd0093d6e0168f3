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

from spheret.kernels import closed
from spheret.kernels.fused import Kernel
from spheret.retractions import RETRACTIONS, P, Retraction, angular
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
# the scalars that the forward keeps per row, as in native.c: |h|^2, <h,f> and |z|^2
KEPT = 3
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
    # there GCC gives vectors places on the stack that are not aligned as its own instructions need it
    if not hasattr(os, "geteuid"):
        raise OSError("native.c is not built on Windows.")
    given = os.environ.get("CC", "")
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise OSError(f"CC={given} is not a command ({error}).") from None
    if command:
        if shutil.which(command[0]) is None:
            raise OSError(f"there is no C compiler {command[0]!r}, which CC names.")
        return command
    path = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if path is None:
        raise OSError("there is no C compiler: install gcc or clang, or set CC.")
    return [path]


def _run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    pipes: Any = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    return subprocess.run(command, env={**os.environ, **variables}, check=False, **pipes)


def version(command: list[str]) -> str:
    """What a compiler says of itself."""
    return _run([*command, "--version"]).stdout


def _build(command: list[str]) -> Path:
    """The path of the compiled library, built now unless the cache has it."""
    made_with = version(command) + " ".join(command[1:])
    parts = [repr(SOURCE.read_bytes()), made_with, repr(FLAGS), platform.machine(), _processor()]
    folder = cache_directory() / f"native-{os.geteuid()}"
    # what lies in it is run: it is this user's own, whatever the umask is
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.so"
    if library.exists():
        return library
    print(f"spheret: compiling the native kernel with {Path(command[0]).name}, once", file=sys.stderr)
    message = ""
    # each process builds its own file and renames it atomically, so several processes may build at once
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "native.so"
        for flags in FLAGS:
            # the compiler's own files stay in the cache
            run = _run([*command, *flags, "-shared", "-fPIC", str(SOURCE), "-o", str(built), "-lm"], TMPDIR=scratch)
            if run.returncode == 0:
                os.replace(built, library)
                return library
            message = run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit code {run.returncode}"
    raise RuntimeError(f"{' '.join(command)} could not build {SOURCE.name}: {message}")


def _open() -> ctypes.CDLL:
    """The library from the cache; one that does not load is built again."""
    path = _build(compiler())
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink()
        return ctypes.CDLL(str(_build(compiler())))


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why it could not be built; tried once per process."""
    try:
        library = _open()
    except (OSError, RuntimeError) as error:
        return f"it could not be built: {error}"
    pointer, integer, real, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_double, ctypes.c_int64
    rest = [size, size, real, pointer, integer, real, real, integer, integer]
    signatures = {
        f"{name}_{h}_{f}": [pointer] * pointers + rest
        for name, pointers in (("forward", 5), ("backward", 12), ("normed_forward", 5), ("normed_backward", 12))
        for h in _TYPES.values()
        for f in _TYPES.values()
    } | {
        f"norm_{name}_{h}": [pointer] * pointers + [size, size, real, integer, integer]
        for name, pointers in (("forward", 3), ("backward", 6))
        for h in _TYPES.values()
    }
    signatures["mix_forward"] = [pointer] * 5 + [size] * 4 + [pointer, integer]
    signatures["mix_backward"] = [pointer] * 9 + [size] * 4 + [pointer, integer]
    signatures["sinkhorn"] = [pointer] * 3 + [size, integer, size, size, integer, ctypes.c_float, integer]
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, size
    return library


@functools.cache
def _function(name: str, *dtypes: torch.dtype) -> Any:
    """The C function of that name for rows of these dtypes."""
    return getattr(_load(), "_".join([name, *(_TYPES[dtype] for dtype in dtypes)]))


@constant_when_traced
def missing() -> str | None:
    """The reason why this machine has no native kernel, or None if it has one."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """CPU memory for C to write to, independent of torch's default dtype and device."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads(elements: int) -> int:
    return 1 if elements < PARALLEL_ELEMENTS else torch.get_num_threads()


def _stream(h: Tensor) -> bool:
    return h.numel() * h.element_size() >= STREAM_BYTES


def _number(x: P) -> float:
    return x.item() if isinstance(x, Tensor) else x


def _shared(h: Tensor, alpha: P, p: P, kind: str, cap: float | None) -> tuple[tuple[Any, ...], Tensor | None]:
    """The last arguments of both C functions, and the tensor of alphas that they point to if each row has its own."""
    n, d, alphas, p = h.numel() // h.shape[-1], h.shape[-1], None, _number(p)
    if isinstance(alpha, Tensor) and alpha.numel() != 1:
        alphas, alpha = alpha.detach().float().expand(*h.shape[:-1], 1).contiguous(), 0.0
    if math.isinf(p):
        # a learned p may reach infinity
        kind = "exponential"
    cap = math.inf if cap is None else cap
    return (n, d, _number(alpha), _pointer(alphas), KINDS[kind], p, cap, _threads(n * d), _stream(h)), alphas


def _extreme(kept: Tensor) -> Tensor:
    """The indices of the rows that C leaves to the closed form."""
    return (_flat(kept)[:, 0] < 0).nonzero().squeeze(1)


def _flat(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _rows(index: Tensor, tensors: tuple[Tensor, ...], alpha: P) -> tuple[Any, ...]:
    """These rows of the tensors, with their alpha."""
    if isinstance(alpha, Tensor) and alpha.numel() != 1:
        alpha = alpha.detach().expand(*tensors[0].shape[:-1], 1).reshape(-1, 1)[index]
    return *(_flat(x)[index] for x in tensors), alpha


def _retraction(kind: str, p: P) -> Retraction:
    return angular(p) if kind == "angular" else RETRACTIONS[kind]


def forward(
    h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, kind: str, cap: float | None
) -> tuple[Tensor, Tensor]:
    """The next state of contiguous rows, and the scalars of each row that the backward needs.

    They are |h|^2, <h,f> and |z|^2, and with a gain 1/sqrt(mean f^2 + EPS), as (n, 3) or (n, 4) float32.
    """
    rest, _alphas = _shared(h, alpha, p, kind, cap)
    out, kept = torch.empty_like(h), _empty(rest[0], KEPT if gain is None else KEPT + 1)
    name = "forward" if gain is None else "normed_forward"
    if _function(name, h.dtype, f.dtype)(*map(_pointer, (h, f, gain, out, kept)), *rest):
        index = _extreme(kept)
        far_h, far_f, alphas = _rows(index, (h, f), alpha)
        _flat(out)[index] = closed.retract(far_h, far_f, alphas, _retraction(kind, p), p, cap, gain)
    return out, kept


def backward(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, kind: str, cap: float | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dh, df, and dalpha, dp and dgain in float32: dalpha has one value, or one per row; dp has one value."""
    rest, alphas = _shared(h, alpha, p, kind, cap)
    dh, df = torch.empty_like(h), torch.empty_like(f)
    chunks = (rest[0] + CHUNK - 1) // CHUNK
    partial = _empty(chunks, 2, dtype=torch.float64)
    dalpha = _empty(*((1,) if not isinstance(alpha, Tensor) else alpha.shape if alphas is None else alphas.shape))
    dp = _empty(*(p.shape if isinstance(p, Tensor) else (1,)))
    name, dgain, gains = "backward", None, None
    if gain is not None:
        name, dgain, gains = "normed_backward", torch.empty_like(gain), _empty(chunks, h.shape[-1])
    tensors = (g, h, f, gain, kept, dh, df, dalpha, dp, dgain, partial, gains)
    if _function(name, h.dtype, f.dtype)(*map(_pointer, tensors), *rest):
        index = _extreme(kept)
        far_g, far_h, far_f, per_row = _rows(index, (g, h, f), alpha)
        more = closed.gradients(far_g, far_h, far_f, per_row, p, gain, _retraction(kind, p), cap)
        _flat(dh)[index], _flat(df)[index] = more[:2]
        if alphas is None:
            dalpha += more[2].sum()
        else:
            _flat(dalpha)[index] = more[2].float()
        for total, part in ((dp, more[3]), (dgain, more[4])):
            if total is not None and part is not None:
                total += part.sum() if total is dp else part
    return dh, df, dalpha, dp, dgain


def _norm_shared(h: Tensor, radius: P) -> tuple[Any, ...]:
    n, d = h.numel() // h.shape[-1], h.shape[-1]
    return (n, d, _number(radius), _threads(n * d), _stream(h))


def norm_forward(h: Tensor, radius: P) -> tuple[Tensor, Tensor]:
    """radius h/|h| of contiguous rows, and |h|^2 of each row."""
    rest = _norm_shared(h, radius)
    out, kept = torch.empty_like(h), _empty(rest[0], 1)
    if _function("norm_forward", h.dtype)(h.data_ptr(), out.data_ptr(), kept.data_ptr(), *rest):
        index = _extreme(kept)
        _flat(out)[index] = closed.normalize(_flat(h)[index], radius)
    return out, kept


def norm_backward(g: Tensor, h: Tensor, radius: P, kept: Tensor) -> tuple[Tensor, Tensor]:
    """dh, and dradius in the shape of radius."""
    rest = _norm_shared(h, radius)
    dh, dradius = torch.empty_like(h), _empty(*(radius.shape if isinstance(radius, Tensor) else (1,)))
    partial = _empty((rest[0] + CHUNK - 1) // CHUNK, dtype=torch.float64)
    if _function("norm_backward", h.dtype)(*(t.data_ptr() for t in (g, h, kept, dh, dradius, partial)), *rest):
        index = _extreme(kept)
        _flat(dh)[index], along = closed.norm_gradients(_flat(g)[index], _flat(h)[index], radius)
        dradius += along.sum()
    return dh, dradius


def _per_token(x: Tensor, rows: int) -> tuple[Tensor, list[int]]:
    """A tensor of `rows` dimensions per token as C takes it, and its strides: 0 for the tokens if all share it."""
    if x.dim() == rows:
        return x.detach(), [0, *x.stride()]
    x = x.detach().flatten(0, -rows - 1) if x.dim() > rows + 1 else x.detach()
    return x, list(x.stride())


def _run_mix(
    name: str, before: tuple[Tensor, ...], weights: Tensor, x: Tensor, post: Tensor | None, f: Tensor | None,
    after: tuple[Tensor | None, ...], of_weights: Tensor | None = None, of_post: Tensor | None = None,
) -> None:  # fmt: skip
    m, (n, d) = weights.shape[-2], x.shape[-2:]
    weights, strides = _per_token(weights, 2)
    for tensor, rows in ((post, 1), (of_weights, 2), (of_post, 1)):
        strides += [0] * (rows + 1) if tensor is None else _per_token(tensor, rows)[1]
    post = None if post is None else _per_token(post, 1)[0]
    x, f = x.detach().contiguous(), None if f is None else f.detach().contiguous()
    rest = (x.numel() // (n * d), m, n, d, (ctypes.c_int64 * len(strides))(*strides), _threads(x.numel()))
    getattr(_load(), name)(*map(_pointer, (*before, weights, x, post, f, *after)), *rest)


def mix_forward(weights: Tensor, x: Tensor, post: Tensor | None, f: Tensor | None) -> Tensor:
    """weights x, plus the rows post_i f: see `spheret.kernels.streams.mix`."""
    out = x.new_empty(*x.shape[:-2], weights.shape[-2], x.shape[-1])
    _run_mix("mix_forward", (), weights, x, post, f, (out,))
    return out


def mix_backward(
    g: Tensor, weights: Tensor, x: Tensor, post: Tensor | None, f: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of all four."""
    tokens, g = x.shape[:-2].numel(), g.contiguous()

    def like(t: Tensor | None, rows: int) -> Tensor | None:
        # laid out as the tensor itself, or once per token where all tokens share it
        return None if t is None else torch.empty_like(t) if t.dim() > rows else t.new_empty(tokens, *t.shape)

    of_weights, of_post = like(weights, 2), like(post, 1)
    of_x, of_f = x.new_empty(x.shape), None if f is None else f.new_empty(f.shape)
    tensors = (of_weights, of_x, of_post, of_f)
    _run_mix("mix_backward", (g,), weights, x, post, f, tensors, of_weights, of_post)
    if of_weights is not None and weights.dim() == 2:
        of_weights = of_weights.sum(0)
    if of_post is not None and post is not None and post.dim() == 1:
        of_post = of_post.sum(0)
    return of_weights, of_x, of_post, of_f


def sinkhorn(start: Tensor, g: Tensor | None, divisions: int, eps: float) -> Tensor:
    """Matrices (..., n, n) after Sinkhorn and Knopp's loop; with the gradient g of the result that of the start."""
    n = start.shape[-1]
    start = start.detach().reshape(-1, n * n)
    out = torch.empty_like(start)
    if g is not None:
        g = g.reshape(start.shape)
        g = g if g.stride() == start.stride() else torch.empty_like(start).copy_(g)
    rest = (len(start), n, *start.stride(), divisions, eps, _threads(start.numel()))
    library: Any = _load()
    library.sinkhorn(*map(_pointer, (start, g, out)), *rest)
    return out


KERNEL = Kernel("native", "cpu", DTYPES, KINDS, KEPT, missing, forward, backward, norm_forward, norm_backward)
