"""The native kernel is built once, cached, safe among processes, and replaced by the closed form if it is missing."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spheret import RETRACTIONS, retract
from spheret.kernels import BACKENDS, native, use

SCRIPT = """
import torch, spheret
from spheret.kernels import chosen, use
h = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
print(chosen(h, h), spheret.retract(h, h.flip(0)).sum().item())
"""


def run(code=SCRIPT, *, cache, check=True, **environment):
    env = {**os.environ, "SPHERET_CACHE": str(cache), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=check)


def folder(cache):
    return cache / f"native-{os.geteuid()}"


class TestBuilding:
    def test_once_with_a_notice_then_from_the_cache(self, tmp_path):
        first, second = run(cache=tmp_path), run(cache=tmp_path)
        assert first.stdout == second.stdout
        assert first.stdout.startswith("native ")
        notices = [[line for line in run.stderr.splitlines() if "spheret" in line] for run in (first, second)]
        assert len(notices[0]) == 1
        assert notices[0][0].startswith("spheret: compiling the native kernel with ")
        assert notices[1] == []
        assert [p.suffix for p in folder(tmp_path).iterdir()] == [".so"]

    def test_two_processes_at_once(self, tmp_path):
        env = {**os.environ, "SPHERET_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", SCRIPT]
        started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = {process.communicate()[0] for process in started}
        assert all(process.returncode == 0 for process in started)
        assert len(outputs) == 1
        assert len(list(folder(tmp_path).iterdir())) == 1

    def test_another_compiler_is_another_library(self, tmp_path):
        wrapper = tmp_path / "mycc"
        wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && echo mine && exit\nexec cc "$@"\n')
        wrapper.chmod(0o755)
        # CC may hold flags
        assert run(cache=tmp_path / "cache", CC="cc -g0").stdout.startswith("native ")
        notice = run(cache=tmp_path / "cache", CC=str(wrapper)).stderr
        assert "with mycc" in notice
        assert len(list(folder(tmp_path / "cache").iterdir())) == 2

    def test_a_compiler_without_openmp_will_do(self, tmp_path):
        wrapper = tmp_path / "plaincc"
        wrapper.write_text('#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec cc "$@"\n')
        wrapper.chmod(0o755)
        assert run(cache=tmp_path / "cache", CC=str(wrapper)).stdout.startswith("native ")


def _truncate(library):
    os.truncate(library, library.stat().st_size // 2)


def _flip(library):
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)


def _open_to_all(library):
    library.chmod(0o666)


def _link(library):
    library.rename(library.parent.parent / "elsewhere.so")
    library.symlink_to(library.parent.parent / "elsewhere.so")


def _pipe(library):
    library.unlink()
    os.mkfifo(library)


class TestTrust:
    """What lies in the cache is run, so it is this user's own, out of reach of others, and whole."""

    @pytest.fixture
    def build(self, tmp_path, monkeypatch):
        """Builds with a stand-in for the compiler, which is quick and says where its own files would go."""
        compiler = tmp_path / "quickcc"
        compiler.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo quick && exit\n'
            f'echo "$TMPDIR" >> {tmp_path / "scratch"}\n'
            'while [ "$1" != -o ]; do shift; done\necho a library > "$2"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
        return lambda: native._build([str(compiler)])

    @pytest.mark.parametrize("mask", [0, 0o277], ids=["open to all", "closed to its owner"])
    def test_nobody_else_can_write_it_whatever_the_umask(self, build, mask, tmp_path):
        (tmp_path / "cache").mkdir()
        before = os.umask(mask)
        try:
            library = build()
        finally:
            os.umask(before)
        assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(library.stat().st_mode) == 0o600
        assert library.parent.parent == tmp_path / "cache"

    @pytest.mark.parametrize("damage", [_truncate, _flip, _open_to_all, _link, _pipe])
    def test_a_damaged_one_is_built_again(self, build, damage, capfd):
        library = build()
        assert capfd.readouterr().err == "spheret: compiling the native kernel with quickcc, once\n"
        damage(library)
        assert build() == library
        notice = f"spheret: the native kernel in {library.parent} is damaged, compiling it again with quickcc\n"
        assert capfd.readouterr().err == notice
        assert native._is_sound(library)
        assert list(library.parent.iterdir()) == [library]
        assert build() == library
        assert capfd.readouterr().err == ""

    def test_another_user_s_file_is_not_loaded(self, build, monkeypatch):
        library = build()
        assert native._is_sound(library)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not native._is_sound(library)
        library.parent.rename(folder(library.parent.parent))
        with pytest.raises(OSError, match="belongs to another user"):
            build()

    def test_a_folder_that_is_a_link_is_not_used(self, build, tmp_path):
        (tmp_path / "cache").mkdir()
        (tmp_path / "elsewhere").mkdir()
        folder(tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match=r"is a link or belongs to another user: remove it, or set SPHERET_CACHE"):
            build()

    def test_the_compiler_s_own_files_stay_in_the_cache(self, build, tmp_path):
        library = build()
        (scratch,) = (tmp_path / "scratch").read_text().split()
        assert Path(scratch).parent == library.parent


class TestWithoutIt:
    """Without the kernel the default still works, and an explicit choice is a clear error."""

    # the default, then the explicit choice
    BOTH = SCRIPT + "use('native')\nspheret.retract(h, h)"

    def broken(self, tmp_path, name):
        wrapper = tmp_path / "badcc"
        wrapper.write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 1\n")
        wrapper.chmod(0o755)
        unwritable = tmp_path / "file"
        unwritable.write_text("")
        return {
            "no compiler": {"PATH": str(tmp_path), "CC": ""},
            "no such compiler": {"CC": "no-such-compiler"},
            "a compiler that fails": {"CC": str(wrapper)},
            "no place to write": {"SPHERET_CACHE": str(unwritable)},
        }[name]

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("no compiler", "there is no C compiler: install gcc or clang, or set CC"),
            ("no such compiler", "there is no C compiler 'no-such-compiler', which CC names"),
            ("a compiler that fails", "could not build native.c: no such luck"),
            ("no place to write", "could not be built: .*Not a directory"),
        ],
    )
    def test(self, tmp_path, name, sentence):
        environment = self.broken(tmp_path, name)
        cache = Path(environment.pop("SPHERET_CACHE", tmp_path / "cache"))
        failed = run(self.BOTH, cache=cache, check=False, **environment)
        assert failed.stdout.startswith("closed ")
        assert failed.returncode != 0
        last = failed.stderr.strip().splitlines()[-1]
        assert last.startswith("RuntimeError: the native backend was asked for, but ")
        assert re.search(sentence, last)

    def test_the_environment_variable(self, tmp_path):
        assert run(cache=tmp_path, SPHERET_BACKEND="reference").stdout.startswith("reference ")
        failed = run(cache=tmp_path, check=False, SPHERET_BACKEND="nativ")
        assert "Did you mean 'native'?" in failed.stderr

    def test_triton_missing_or_no_gpu(self, tmp_path):
        code = "import torch, spheret\nh = torch.ones(2, 4)\nspheret.kernels.use('triton')\nspheret.retract(h, h)"
        message = run(code, cache=tmp_path, check=False, TRITON_INTERPRET="0").stderr.strip().splitlines()[-1]
        assert "the triton backend was asked for, but it runs on CUDA, and the rows are on cpu" in message
        hide = "import importlib.util as u\nfind = u.find_spec\n"
        hide += "u.find_spec = lambda n, *a: None if n == 'triton' else find(n, *a)\n"
        message = run(hide + code, cache=tmp_path, check=False).stderr.strip().splitlines()[-1]
        assert 'triton is not installed. Run: pip install "spheret[triton]"' in message


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name, row in RETRACTIONS.items() if BACKENDS["native"].knows(row)])
def test_the_same_bits_for_any_number_of_threads(name, threads):
    h, f, g = (torch.randn(1000, 96) for _ in range(3))
    seen = []
    for count in (1, 2, 3, 4):
        threads(count)
        x, y = h.clone().requires_grad_(), f.clone().requires_grad_()
        alpha = torch.tensor([0.7], requires_grad=True)
        p = torch.tensor([0.5], requires_grad=True) if name == "angular" else name
        with use("native"):
            out = retract(x, y, alpha, p, 0.5)
        learned = (alpha, p) if name == "angular" else (alpha,)
        seen.append([out, *torch.autograd.grad(out, (x, y, *learned), g)])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_results_past_the_cache_are_the_same(monkeypatch):
    """Large results are written with non-temporal stores, which must not change them."""
    h, f, g = (torch.randn(256, 128) for _ in range(3))
    seen = []
    for limit in (0, 1 << 40):
        monkeypatch.setattr(native, "STREAM_BYTES", limit)
        for branch in (torch.float32, torch.bfloat16):
            x, y = h.clone().requires_grad_(), f.to(branch).requires_grad_()
            out = retract(x, y, 0.5)
            seen.append([out, *torch.autograd.grad(out, (x, y), g)])
    for index in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(seen[index], seen[index + 2], strict=True))
