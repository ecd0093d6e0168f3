"""MKL's fast code on AMD processors: the library answers 1, and nothing happens where nobody asks or needs it."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spheret.support import mkl
from spheret.support.child import Child

AMD = "AuthenticAMD"


def test_the_library_says_that_the_processor_is_intels(tmp_path, monkeypatch):
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path))
    path = mkl.library()
    built = path.stat().st_mtime_ns
    answers = ctypes.CDLL(str(path))
    assert (answers.mkl_serv_intel_cpu_true(), answers.mkl_serv_intel_cpu()) == (1, 1)
    assert mkl.library() == path
    assert path.stat().st_mtime_ns == built
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


# the last one loads it, before torch, whose products are right
PROGRAM = f"""
import os
from pathlib import Path
from spheret.support import mkl

def names(asked, vendor, compiler):
    os.environ |= {{mkl.VARIABLE: asked, "CC": compiler}}
    mkl.vendor = lambda: vendor
    mkl.load()
    return mkl.names()

for case in (("fast", "GenuineIntel", "cc"), ("", {AMD!r}, "cc"), ("fast", {AMD!r}, "no-such-compiler")):
    assert names(*case) == [] == list(Path(mkl.cache_directory()).rglob("*.so")), case
assert names("fast", {AMD!r}, "cc") == ["mkl-fast"]
import torch
a = torch.randn(64, 64)
torch.testing.assert_close(a @ a, (a.double() @ a.double()).float(), rtol=1e-4, atol=1e-4)
"""


def test_when_it_is_loaded(tmp_path):
    environment = {**os.environ, "SPHERET_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("own", [None, "off"])
def test_the_lab_asks_for_it_unless_the_user_has_chosen(own, tmp_path, monkeypatch):
    monkeypatch.delenv(mkl.VARIABLE, raising=False)
    if own is not None:
        monkeypatch.setenv(mkl.VARIABLE, own)
    child = Child(["--version"], tmp_path / "log")
    environment = Path(f"/proc/{child._process.pid}/environ").read_text()
    child._process.wait()
    assert f"{mkl.VARIABLE}={own or mkl.FAST}\0" in environment
