"""`spheret doctor`: what it prints, and that it sees a backend that computes something else."""

import pytest
import torch

from spheret.cli import main
from spheret.doctor import check_backend
from spheret.kernels import BACKENDS


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_is_checked(name):
    assert check_backend(name)[0]


def test_a_sick_backend_is_seen(monkeypatch):
    monkeypatch.setitem(BACKENDS, "closed", BACKENDS["closed"]._replace(retract=lambda h, f, *_: h + 0 * f))
    assert not check_backend("closed")[0]


def test_the_command(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["torch", torch.__version__] in [line.split() for line in lines]
    rows = (*(f"backend {name}" for name in BACKENDS), "cache")
    assert all(any(line.startswith(row) for line in lines) for row in rows)
