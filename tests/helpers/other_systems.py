"""What other systems lack, taken away from this Python before spheret is imported, and the jobs that must go on.

    python -X warn_default_encoding tests/helpers/other_systems.py DATA OUT

prints one line of JSON per system and job: [system, job, what went wrong or null]. The packages that spheret stands
on are imported first: they have ways of their own on other systems. Then one fork per system loses what the system
lacks, and does every job.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import io
import json
import mmap
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock

# what is imported before a system loses anything
PACKAGES = (
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor", "numpy", "jinja2", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "msgspec", "rich.console", "rich.progress",
    "safetensors.torch", "scipy.stats", "transformers.models.gpt2.modeling_gpt2", "tyro", "http.server",
)  # fmt: skip

# Windows has none of these, and takes handlers of SIGINT, SIGTERM and SIGBREAK alone
MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
FUNCTIONS = (
    "chown", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getuid",
    "killpg", "lchown", "mkfifo", "nice", "sched_getaffinity", "sched_setaffinity", "setpgid", "setsid", "statvfs",
    "sysconf", "uname", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK",
)  # fmt: skip
SIGNALS = ("SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGPROF", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm")
# a checkpoint of every step, and the newest one kept
TINY = (
    "--layers", "2", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4", "--eval-windows", "4",
    "--eval-every", "2", "--checkpoint-every", "1", "--keep", "1", "--steps", "8", "--threads", "1",
    "--no-tensorboard", "--device", "cpu", "--quiet",
)  # fmt: skip
# no file of Windows has these letters in its name, one of these names, or a dot or a space at its end
LETTERS = frozenset('<>:"|?*')
RESERVED = {"con", "prn", "aux", "nul", *(f"{name}{number}" for name in ("com", "lpt") for number in range(1, 10))}


def remove(owner: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)


def no_proc(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: a system without /proc and /sys."""
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")) and not _looking:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(arguments[0]))


# whether the hooks themselves read /proc
_looking: list[bool] = []


def held(path: str) -> bool:
    """Whether this process has a file open or mapped, or one in this directory."""
    _looking.append(True)
    try:
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        names = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(f"/proc/self/fd/{number}"))
        with open("/proc/self/maps", encoding="utf-8") as maps:
            names += [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/")]
        return any(name == path or name.startswith(path + "/") for name in names)
    finally:
        _looking.pop()


def windows_files(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: directories are not opened, an open file is neither renamed, replaced nor removed, names."""
    if event in ("open", "os.mkdir") and not _looking:
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        path = os.fsdecode(path)
        writes = event == "os.mkdir" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if event == "open" and not writes and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        name = os.path.basename(path)
        if writes and (LETTERS & set(name) or name.split(".")[0].lower() in RESERVED or name.endswith((".", " "))):
            raise OSError(errno.EINVAL, "Invalid argument", path)
    elif event in ("os.rename", "os.remove", "os.rmdir"):
        for path in arguments[: 2 if event == "os.rename" else 1]:
            if held(os.fsdecode(path)):
                raise PermissionError(errno.EACCES, "The process cannot access the file", os.fsdecode(path))


class Libraries(ctypes.CDLL):
    """ctypes on Windows: the program itself is no library."""

    def __init__(self, name: str | None, *arguments: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        super().__init__(name, *arguments, **options)


class OtherC(ctypes.CDLL):
    """The C library of a Mac: no mallopt, no prctl."""

    def __getattr__(self, name: str) -> Any:
        if name in ("mallopt", "prctl"):
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return super().__getattr__(name)


def no_compiler() -> None:
    os.environ["PATH"] = ""
    os.environ.pop("CC", None)


def windows() -> None:
    usage = shutil.disk_usage(".")
    # there it is another class that locks
    filelock._unix.os = SimpleNamespace(**vars(os))  # type: ignore[attr-defined]
    no_compiler()
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    remove(os, FUNCTIONS)
    # what it has instead, under a number that this system can send
    signal.SIGBREAK = signal.CTRL_BREAK_EVENT = signal.SIGUSR1  # type: ignore[attr-defined]
    subprocess.CREATE_NEW_PROCESS_GROUP = 0  # type: ignore[attr-defined]
    remove(signal, SIGNALS)
    remove(mmap, tuple(name for name in dir(mmap) if name.startswith("MADV")))
    ctypes.CDLL = Libraries  # type: ignore[misc]
    # it has another way to ask for the size of a disk, and removes trees by names
    shutil.disk_usage = lambda path: usage
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.addaudithook(no_proc)
    sys.addaudithook(windows_files)
    sys.platform = "win32"


def macos() -> None:
    """cc takes neither -fopenmp nor -march=native, as Apple's for arm64 did."""
    remove(os, ("sched_getaffinity", "sched_setaffinity"))
    remove(mmap, ("MADV_HUGEPAGE",))
    ctypes.CDLL = OtherC  # type: ignore[misc]
    compiler, real = Path("cc"), shutil.which("cc")
    refused = 'case "$word" in -fopenmp*|-march=native) echo "unsupported option $word" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\nfor word in "$@"; do {refused}; done\nexec {real} "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    os.environ["CC"] = str(compiler.absolute())
    sys.addaudithook(no_proc)
    sys.platform = "darwin"


SYSTEMS: dict[str, Callable[[], None]] = {"windows": windows, "macos": macos, "no compiler": no_compiler}


def refused(call: Callable[[], object], error: type[BaseException]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def bites(system: str) -> None:
    """What was taken away is away."""
    assert (shutil.which("cc") is None) == (system != "macos")
    if system == "no compiler":
        return
    assert sys.platform == {"windows": "win32", "macos": "darwin"}[system]
    assert not hasattr(os, "sched_getaffinity")
    assert refused(Path("/proc/cpuinfo").read_bytes, FileNotFoundError)
    if system == "macos":
        assert refused(lambda: ctypes.CDLL(None).mallopt, AttributeError)
        return
    assert all(refused(lambda name=name: importlib.import_module(name), ImportError) for name in MODULES)
    assert not [name for name in FUNCTIONS if hasattr(os, name)]
    assert not [name for name in SIGNALS if hasattr(signal, name)]
    assert refused(lambda: ctypes.CDLL(None), TypeError)
    assert refused(lambda: os.open(".", os.O_RDONLY), PermissionError)
    assert refused(lambda: Path("a:b").touch(), OSError)
    first, second = Path("first"), Path("second")
    second.touch()
    with first.open("wb"):
        for change in (first.unlink, lambda: first.replace(second), lambda: second.replace(first)):
            assert refused(change, PermissionError)
    first.write_bytes(b"mapped")
    with first.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert refused(first.unlink, PermissionError)
    mapped.close()
    first.replace(second)
    second.unlink()


def rename(system: str) -> None:
    """A file takes the place of one that somebody reads for a moment."""
    from spheret.support import files

    Path("new").write_bytes(b"new")
    Path("old").write_bytes(b"old")
    # the reader ends while the rename waits for it; on systems that do not wait it ends afterwards
    with Path("old").open("rb") as reader:
        sleep, time.sleep = time.sleep, lambda seconds: reader.close()
        files.rename(Path("new"), Path("old"))
        time.sleep = sleep
        assert reader.closed == (system == "windows")
    assert Path("old").read_bytes() == b"new"
    assert refused(lambda: files.read_regular(Path(), 1), files.NotRegular)


def typed(system: str) -> None:
    """A printed command can be typed into the shell of the system."""
    from spheret.support.child import typed

    quoted = r'"C:\my runs\race"' if system == "windows" else r"'C:\my runs\race'"
    assert typed(["spheret", "study", r"C:\my runs\race"]) == f"spheret study {quoted}"


def imports(system: str) -> None:
    """Every module. Triton is for Linux."""
    import spheret

    names = [found.name for found in pkgutil.walk_packages(spheret.__path__, "spheret.")]
    for name in names:
        if not name.endswith(("__main__", "triton_rows")):
            importlib.import_module(name)
    assert len(names) > 100


def update(system: str) -> None:
    """One update on every backend, compared with float64; doctor names the one that is missing, and why."""
    from spheret.doctor import check_backend, doctor
    from spheret.kernels import BACKENDS, native

    checks = {name: check_backend(name) for name in BACKENDS}
    assert all(agrees for agrees, _ in checks.values()), checks
    assert "agrees" in checks["closed"][1]
    assert ("agrees" in checks["native"][1]) == (system == "macos"), checks["native"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert doctor() == 0
    rows = dict(line.split(maxsplit=1) for line in printed.getvalue().splitlines() if line.startswith("compiler"))
    if system != "macos":
        assert native.missing() in printed.getvalue()
        assert "closed" in rows["compiler"]


def command(*words: str, code: int = 0) -> None:
    from spheret.cli import main

    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        ended = main(words)
    assert ended == code, error.getvalue()


def prepare(system: str) -> None:
    for number in range(3):
        Path("texts").mkdir(exist_ok=True)
        Path(f"texts/{number}.txt").write_text("One sphere, many turns. " * 100, encoding="utf-8")
    for _ in range(2):
        command("prepare", "texts", "--tokenizer", "bytes", "--out", "prepared", "--shard-tokens", "2000")
    assert len(list(Path("prepared").glob("*.bin"))) > 3


def train(system: str) -> None:
    """A training is asked to stop as its parent would ask it, and saves. The same command resumes it."""
    from spheret.support import child

    asked: list[str] = []

    def ask(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith("step-3") and not asked:
            asked.append(event)
            os.kill(os.getpid(), child._STOP)

    sys.addaudithook(ask)
    words = ("train", "--scheme", "proj-spheretnorm", "--data", DATA, *TINY, "--out", "run")
    command(*words, code=149 if system == "windows" else 143)
    assert Path("run/metrics.jsonl").read_bytes().count(b"\n") < 8
    command(*words)
    assert Path("run/metrics.jsonl").read_bytes().count(b"\n") == 8
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-8"]


def pages(system: str) -> None:
    for name, words in {"report": ("run",), "explore": ()}.items():
        command(name, *words, "--out", name if name == "report" else f"{name}.html")
    assert Path("explore.html").stat().st_size > 10_000
    assert list(Path("report").glob("*.html"))


def watch(system: str) -> None:
    import torch
    from torch import nn

    import spheret

    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    seen = spheret.watch(model, every=1, out="watched")
    for _ in range(2):
        loss = model(torch.randint(20, (4, 9))).square().mean()
        loss.backward()
        seen.step(loss)
    seen.close()
    assert Path("watched/watch.jsonl").read_bytes().count(b"\n") >= 2


def convert(system: str) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import spheret

    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()
    ids = torch.randint(40, (2, 8))
    before = model(ids).logits
    spheret.convert(model, example_inputs={"input_ids": ids})
    assert torch.allclose(before, model(ids).logits, atol=1e-4)


JOBS: dict[str, Callable[[str], None]] = {
    "bites": bites, "imports": imports, "rename": rename, "typed": typed, "update": update, "prepare": prepare,
    "train": train, "pages": pages, "watch": watch, "convert": convert,
}  # fmt: skip


def do(system: str) -> Iterator[tuple[str, str | None]]:
    SYSTEMS[system]()
    # text is read and written in an encoding that is named, and not in that of the system
    warnings.filterwarnings("error", category=EncodingWarning, module="spheret")
    for name, job in JOBS.items():
        try:
            job(system)
            yield name, None
        except BaseException:
            yield name, traceback.format_exc()


if __name__ == "__main__":
    DATA, out = str(Path(sys.argv[1]).absolute()), Path(sys.argv[2]).absolute()
    for package in PACKAGES:
        importlib.import_module(package)
    import torch

    torch.set_num_threads(1)
    fork, leave = os.fork, os._exit
    for system in SYSTEMS:
        child = fork()
        if not child:
            try:
                place = out / system
                place.mkdir()
                os.chdir(place)
                os.environ["SPHERET_CACHE"] = str(place / "cache")
                for name, wrong in do(system):
                    print(json.dumps([system, name, wrong]), flush=True)
            finally:
                leave(0)
        os.waitpid(child, 0)
