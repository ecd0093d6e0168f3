"""Certificates of a real race: every spherical scheme's checkpoint, every sublayer, 64 tokens."""

import pytest
import torch

from spheret import SCHEMES
from spheret.analysis.sublayers import float64_twin, states
from spheret.certificates.certificate import verify
from spheret.certificates.certify import certify_run
from spheret.cli import main
from spheret.connections import Spherical, scheme
from spheret.runs.run import open_run

SPHERICAL = tuple(name for name in SCHEMES if isinstance(scheme(name), Spherical))
VARIANTS = ("p-spheretnorm:learnable_p=true", "proj-spheretnorm:inner_norm=true")
SIZE = ["--steps", "20", "--layers", "2", "--width", "32", "--eval-windows", "8", "--lr", "3e-3"]


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A small race of every spherical scheme and two variants."""
    out = tmp_path_factory.mktemp("race") / "out"
    assert main(["race", "--schemes", ",".join([*SPHERICAL, *VARIANTS]), *SIZE, "--out", str(out), "--quiet"]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SPHERICAL, *VARIANTS])
def test_no_bound_is_violated_on_a_checkpoint_of_the_race(raced, name):
    run = open_run(raced / f"{name.replace(':', '-')}-1337")
    certificate = certify_run(run, tokens=64, sequence=8)
    assert (certificate.checkpoint, certificate.tokens) == (20, 64)
    assert verify(certificate) == []
    for part in (certificate.own_path, certificate.sequence):
        assert [row.sublayer for row in part.sublayers] == [1, 2, 3, 4]
        assert {row.verdict for row in part.sublayers} <= {"proven"}
        assert all(row.violations == 0 for row in [*part.sublayers, *part.depth])


@pytest.mark.slow
@pytest.mark.parametrize("name", SPHERICAL)
def test_its_bounds_hold_for_the_jacobian_of_the_model_itself(raced, name):
    """Against autograd through the connection, which shares no line with the certificate."""
    run = open_run(raced / f"{name}-1337")
    certificate = certify_run(run, tokens=8, sequence=8)
    ids = next(iter(run.data().validation(run.model_config.block, 1, windows=1)))[0][:, :8]
    for s, row in zip(states(float64_twin(run.model()), ids), certificate.sequence.sublayers, strict=True):
        J = torch.autograd.functional.jacobian(lambda h, s=s: s.connection(h, s.branch), s.h)
        values = torch.linalg.svdvals(J.reshape(s.h.numel(), s.h.numel()))
        assert float(values[0]) <= 1 + row.delta_max + 1e-9
        assert float(values[-1]) >= row.m_exact_min - 1e-9
        assert float(values[0]) == pytest.approx(row.sigma_max, rel=1e-9)
        assert float(values[-1]) == pytest.approx(row.sigma_min, rel=1e-6)
