"""The native kernel is built once, cached, safe among processes, and replaced by the closed form if it is missing."""

import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spheret import RETRACTIONS, retract
from spheret.kernels import BACKENDS, chosen, native, triton, use

SCRIPT = """
import torch, spheret
from spheret.kernels import chosen, use
h = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
print(chosen(h, h), spheret.retract(h, h.flip(0)).sum().item())
"""


def run(code=SCRIPT, *, cache, check=True, **environment):
    env = {**os.environ, "SPHERET_CACHE": str(cache), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=check)


def program(path, *lines):
    """A shell script that stands for a compiler."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


def folder(cache):
    return cache / f"native-{os.geteuid()}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


class TestBuilding:
    def test_once_also_by_two_processes_at_once(self, cache):
        env = {**os.environ, "SPHERET_CACHE": str(cache)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, **pipes) for _ in range(2)]
        (first, notice), (second, other) = (process.communicate() for process in started)
        assert first == second
        assert first.startswith("native ")
        assert "compiling the native kernel" in notice + other
        again = run(cache=cache)
        assert again.stdout == first
        assert "spheret" not in again.stderr
        assert [p.suffix for p in folder(cache).iterdir()] == [".so"]

    def test_a_library_that_does_not_load_is_built_again(self, cache):
        (library,) = folder(cache).iterdir()
        library.write_text("no library")
        again = run(cache=cache)
        assert again.stdout.startswith("native ")
        assert "compiling" in again.stderr
        assert list(folder(cache).iterdir()) == [library]

    def test_a_different_compiler_is_a_different_library_and_openmp_is_not_needed(self, cache, tmp_path):
        without = 'case "$*" in *-fopenmp*) exit 1;; esac'
        wrapper = program(tmp_path / "mycc", '[ "$1" = --version ] && echo mine && exit', without, 'exec cc "$@"')
        # CC may hold flags
        built = run(cache=cache, CC=f"{wrapper} -g0")
        assert built.stdout.startswith("native ")
        assert "mycc" in built.stderr
        assert len(list(folder(cache).iterdir())) == 2


def test_its_folder_is_this_user_s_own_and_holds_the_compiler_s_files_too(tmp_path, monkeypatch):
    version, scratch = '[ "$1" = --version ] && echo quick && exit', tmp_path / "scratch"
    write = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    compiler = program(tmp_path / "quickcc", version, f'echo "$TMPDIR" >> {scratch}', write)
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    library = native._build([compiler])
    assert library.parent == folder(tmp_path / "cache")
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert Path(scratch.read_text().strip()).parent == library.parent


class TestWithoutIt:
    """Without a kernel the default still works, and an explicit choice is an error that gives the reason."""

    h = torch.ones(2, 4)

    def refused(self, name, noun):
        assert chosen(self.h, self.h) == ("closed" if name == "native" else "native")
        with pytest.raises(RuntimeError) as error, use(name):
            retract(self.h, self.h)
        assert noun in str(error.value)

    @pytest.mark.parametrize(
        ("broken", "noun"),
        [
            ("no compiler", "install gcc or clang"),
            ("no such compiler", "no-such-compiler"),
            ("a compiler that fails", "no such luck"),
            ("no place to write", "Not a directory"),
        ],
    )
    def test_native(self, tmp_path, monkeypatch, broken, noun):
        file = tmp_path / "file"
        file.touch()
        variables = {
            "no compiler": {"PATH": str(tmp_path), "CC": ""},
            "no such compiler": {"CC": "no-such-compiler"},
            "a compiler that fails": {"CC": program(tmp_path / "badcc", "echo 'no such luck' >&2", "exit 1")},
            "no place to write": {"SPHERET_CACHE": str(file)},
        }[broken]
        for variable, value in {"SPHERET_CACHE": str(tmp_path / "cache"), **variables}.items():
            monkeypatch.setenv(variable, value)
        native._load.cache_clear()
        try:
            self.refused("native", noun)
        finally:
            native._load.cache_clear()

    def test_triton(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        triton._missing.cache_clear()
        try:
            self.refused("triton", "spheret[triton]")
        finally:
            triton._missing.cache_clear()
        monkeypatch.setattr(triton.KERNEL, "device", "cuda")
        self.refused("triton", "cuda")

    def test_the_environment_variable(self, cache):
        assert run(cache=cache, SPHERET_BACKEND="reference").stdout.startswith("reference ")


@pytest.mark.parametrize("name", [name for name in RETRACTIONS if BACKENDS["native"].knows(RETRACTIONS[name])])
def test_the_same_bits_for_any_number_of_threads_and_past_the_cache(name, monkeypatch):
    """Large results are written with non-temporal stores, which must not change them."""
    before, seen = torch.get_num_threads(), []
    h, f, g = (torch.randn(1000, 96) for _ in range(3))
    for threads, limit in ((1, 1 << 40), (2, 1 << 40), (3, 0)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(native, "STREAM_BYTES", limit)
        results = []
        for branch in (torch.float32, torch.bfloat16):
            x, y = h.clone().requires_grad_(), f.to(branch).requires_grad_()
            learned = [torch.tensor([0.7], requires_grad=True)]
            learned += [torch.tensor([0.5], requires_grad=True)] if name == "angular" else []
            with use("native"):
                out = retract(x, y, learned[0], learned[1] if name == "angular" else name, 0.5)
            results += [out, *torch.autograd.grad(out, (x, y, *learned), g)]
        seen.append(results)
    torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
