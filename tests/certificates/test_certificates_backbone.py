"""Jacobians and proofs on the other backbones: rotary positions, gates, norms of heads, shared keys."""

import pytest
import torch
from small_models import TINY, randomize, tokens

from spheret import GPT, GPTConfig
from spheret.analysis import sublayers
from spheret.certificates import enclosed_jacobians

MODERN = {"positions": "rope", "mlp": "swiglu", "norm": "rmsnorm", "bias": False}
CASES = [
    ("pre-ln", {**MODERN, "qk_norm": True, "kv_heads": 2}),
    ("proj-spheretnorm", {**MODERN, "kv_heads": 1, "mlp": "relu2", "scheme_options": {"prores": 10.0}}),
    ("hybridnorm", MODERN),
    ("ngpt", MODERN),
    ("beam", {"kv_heads": 2}),
    ("res-post", {}),
    ("residual-multiplier", {}),
]


@pytest.mark.parametrize(("scheme", "options"), CASES, ids=[name for name, _ in CASES])
def test_a_tokens_own_path_and_its_proof(scheme, options):
    config = GPTConfig(**{**TINY, "layers": 1, "heads": 4, **options}, scheme=scheme)
    model = randomize(GPT(config))
    model.at_update(6)
    twin = sublayers.float64_twin(model)
    positions = torch.tensor([0, 3, 8])
    for s in sublayers.states(twin, tokens(1, 9)):
        x = s.h[:, positions]
        both = sublayers.own_path(s, positions)
        f, out = both(x)
        # the path of single tokens goes through the states of the whole sequence
        torch.testing.assert_close(f, s.f[:, positions])
        torch.testing.assert_close(out, s.out[:, positions])
        with sublayers.differentiable():
            A, J = sublayers.token_jacobians(s, both, x)
            if s.kind == "attention":
                whole = sublayers.sequence_jacobians(s, sublayers.whole_sequence(s), s.h)[1]
                blocks = whole.view(9, 16, 9, 16)[positions, :, positions]
                torch.testing.assert_close(J, blocks)
        balls = enclosed_jacobians.token_balls(s, positions)
        torch.testing.assert_close(balls.A, A)
        assert ((balls.J.mid - J).abs().amax((-2, -1)) <= balls.J.radius + 1e-12).all()
        # narrow enough to say something
        assert (balls.J.radius <= 1e-9 * J.abs().amax((-2, -1)).clamp(min=1)).all()
        sequence = enclosed_jacobians.sequence_balls(s)
        assert sequence.J.radius.isfinite().all()
