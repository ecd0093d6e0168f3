"""mps has no float64. Here the CPU has none either: layer, training and watch must do without."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import spheret
from spheret import kernels
from spheret.cli import main
from spheret.support import precision

PACKAGE = str(Path(spheret.__file__).parent)
# a checkpoint of every step, and the newest one kept
TINY = (
    "--layers", "2", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4", "--eval-every", "2",
    "--set", "evaluation.eval_windows=4", "--set", "train.checkpoint_every=1", "--set", "train.keep=1",
    "--steps", "8", "--threads", "1", "--device", "cpu", "--quiet",
)  # fmt: skip


class NoFloat64(TorchDispatchMode):
    """Notes the lines of spheret that compute in float64, except what they move to the CPU, and what is data."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_iter(out)):
            frame = sys._getframe(1)
            while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back
            place, number = frame.f_code.co_filename, frame.f_lineno
            on_cpu = "cpu" in linecache.getline(place, number) or frame.f_code.co_name == "log_frequencies"
            if not on_cpu and Path(place).parent.name != "data":
                self.lines.add(f"{place}:{number}")
        return out


@contextmanager
def device_without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", {"mps", "cpu"})
    with kernels.use("closed"), NoFloat64() as mode:
        yield mode.lines


@pytest.mark.parametrize("retraction", spheret.RETRACTIONS)
def test_an_update(retraction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    h, f = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    expected = spheret.retract(h, f, 0.5, retraction)
    with device_without_float64(monkeypatch) as lines:
        out = spheret.retract(h, f, 0.5, retraction)
        out.sum().backward()
    assert not lines
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_training(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--scheme", "p-spheretnorm", "--data", str(prepared), *TINY, "--out", str(tmp_path / "run")]
    with device_without_float64(monkeypatch) as lines:
        assert main(["train", *words]) == 0
    assert not lines


def test_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(20, 16), encoder, nn.Linear(16, 20))
    with device_without_float64(monkeypatch) as lines:
        seen = spheret.watch(model, every=1)
        for _ in range(3):
            x = torch.randint(20, (4, 9))
            loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            seen.step(loss)
        seen.close()
    assert len(seen.observations) == 3
    assert not lines
