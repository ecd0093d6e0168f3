"""What people get wrong first, and the sentence that helps."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import spheret
from spheret.model.linear import Linear, plain_linears

IMAGES = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(0))


def test_a_forgotten_channel_dim_is_named():
    norm = spheret.SpheretNorm(6, 1)
    with pytest.raises(ValueError, match=r"width 6, got shape \(2, 6, 4, 5\).*channel_dim=1"):
        norm(IMAGES, IMAGES)
    with pytest.raises(ValueError, match=r"channel_dim=1"):
        spheret.scheme("pre-ln").connect(6, 1, 2).write(IMAGES, IMAGES)


def test_a_width_that_was_guessed_is_said_to_be():
    tokens, channels = nn.Linear(16, 16), nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"different widths .*16 .*branch 0.*8 .*branch 1.*give dim"):
        spheret.residual_stack([tokens, channels])
    stack = spheret.residual_stack([tokens, nn.Linear(16, 16)])
    with pytest.raises(ValueError, match=r"dim = 16 was guessed from in_features of the first Linear of branch 0"):
        stack(torch.randn(2, 16, 8))
    assert stack(torch.randn(2, 8, 16)).shape == (2, 8, 16)


def test_integers_of_numpy():
    assert spheret.SpheretNorm(np.int64(6), 1, channel_dim=1)(IMAGES, IMAGES).shape == IMAGES.shape
    assert type(spheret.scheme("pre-ln").connect(np.int64(6), 1, 2).dim) is int
    with pytest.raises(ValueError, match=r"at least 2, got 6\.0"):
        spheret.SpheretNorm(6.0, 1)


def test_channel_dim_is_no_option_of_a_scheme():
    with pytest.raises(ValueError, match="residual_stack, Residual"):
        spheret.scheme("pre-ln", channel_dim=1)


def test_torch_fx():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = spheret.SpheretNorm(6, 1)

        def forward(self, h):
            return self.norm(h, h.tanh())

    with pytest.raises(TypeError, match=r"torch\.fx cannot trace SpheretNorm"):
        torch.fx.symbolic_trace(Model())


def test_parameters_in_place_of_the_model():
    with pytest.raises(TypeError, match=r"leave out \.parameters\(\)"):
        spheret.parameter_groups(nn.Linear(2, 2).parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation_swaps_every_linear_layer():
    torch.manual_seed(0)
    model = spheret.GPT(spheret.GPTConfig(layers=1, heads=2, width=32, block=8, vocab=11)).eval()
    tokens = torch.randint(11, (2, 8))
    with torch.no_grad():
        before = model(tokens)
        plain = copy.deepcopy(model)
        plain_linears(plain)
        assert torch.equal(plain(tokens), before)
        quantised = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
        names = [type(module).__module__ for module in quantised.modules() if type(module).__name__ == "Linear"]
        assert len(names) == sum(isinstance(module, Linear) for module in model.modules()) == 4
        assert all("quantized" in name for name in names)
        torch.testing.assert_close(quantised(tokens), before, rtol=0.1, atol=0.05)
