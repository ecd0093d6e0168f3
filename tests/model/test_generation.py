"""Generation with a smaller vocabulary, and linear layers on single rows."""

import pytest
import torch
import torch.nn.functional as F
from small_models import TINY, randomize, tokens

from spheret import GPT, GPTConfig
from spheret.model.gpt import Cache
from spheret.model.linear import Linear, linear, plain_linears


def small_model(scheme="proj-spheretnorm", **changes):
    return randomize(GPT(GPTConfig(**{**TINY, **changes}, scheme=scheme))).double().eval()


def test_several_tokens_after_a_cache():
    model, x = small_model(), tokens(2, 12)
    cache = Cache(model.config, 2, x.device, torch.float64)
    parts = [model.stream(x[:, a:b], cache) for a, b in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), model.stream(x))
    assert cache.length == 12


def test_embeddings_stand_for_tokens():
    model, x = small_model(), tokens(2, 12)
    cache = Cache(model.config, 2, x.device, torch.float64)
    parts = [model.stream(model.tokens(x[:, :5]), cache), model.stream(x[:, 5:], cache)]
    torch.testing.assert_close(torch.cat(parts, 1), model.stream(x))
    with pytest.raises(ValueError, match=r"or embeddings \(batch, time, \d+\), got \(2, 12, 3\)"):
        model.stream(model.tokens(x)[..., :3])


def test_ids_beyond_the_vocabulary():
    model = small_model()
    with torch.no_grad():
        model.tokens.weight[40:] *= 5
    x = tokens(4, 3)
    assert (model.generate(x, 20, seed=1)[:, 3:] >= 40).any()
    assert (model.generate(x, 20, seed=1, vocab=40)[:, 3:] < 40).all()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
class TestSingleRows:
    @pytest.mark.parametrize("shape", [(1, 1, 12), (1, 12), (12,), (2, 12), (0, 12)], ids=str)
    @pytest.mark.parametrize("rows", [8, 7])
    @pytest.mark.parametrize("bias", [True, False])
    def test_as_the_usual(self, shape, rows, bias):
        torch.manual_seed(0)
        module, x = Linear(12, rows, bias=bias).double(), torch.randn(shape, dtype=torch.float64)
        expected = F.linear(x, module.weight, module.bias)
        torch.testing.assert_close(module(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(module(x), expected.detach())

    def test_gradients_are_the_usual(self):
        x, weight = torch.randn(1, 12, requires_grad=True), torch.randn(8, 12, requires_grad=True)
        linear(x, weight).sum().backward()
        torch.testing.assert_close(x.grad, weight.detach().sum(0, keepdim=True))

    def test_transposed_weights_and_autocast(self):
        x, weight = torch.randn(1, 12), torch.randn(12, 8).T
        with torch.no_grad():
            torch.testing.assert_close(linear(x, weight), x @ weight.T)
            with torch.autocast("cpu", torch.bfloat16):
                y = linear(x, weight.contiguous(), torch.ones(8))
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y.float(), x @ weight.T + 1, rtol=2e-2, atol=5e-2)


@pytest.mark.filterwarnings("ignore")
def test_plain_linears_are_quantised():
    """torch.ao passes over subclasses of nn.Linear."""
    model, x = small_model().float(), tokens(2, 8)
    with torch.no_grad():
        before = model(x)
        plain_linears(model)
        assert torch.equal(model(x), before)
        quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        names = [type(module).__module__ for module in quantised.modules() if type(module).__name__ == "Linear"]
        assert len(names) == 8
        assert all("quantized" in name for name in names)
        torch.testing.assert_close(quantised(x), before, rtol=0.2, atol=0.2)
