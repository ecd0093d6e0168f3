"""Generation with padded rows, a smaller vocabulary and an early end; and linear layers on single rows."""

import pytest
import torch
import torch.nn.functional as F

from spheret import GPT, SCHEMES, GPTConfig
from spheret.model.gpt import Cache
from spheret.model.linear import Linear, linear


def small_model(scheme="proj-spheretnorm"):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, heads=2, width=16, block=24, vocab=50, scheme=scheme)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.eval()


def tokens(batch, time, seed=0):
    return torch.randint(50, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_padded_rows_are_each_alone_also_beyond_the_block(name, cached):
    model, lengths = small_model(name), (3, 9, 6)
    rows = [tokens(1, n, seed=n) for n in lengths]
    padding = torch.tensor([9 - n for n in lengths])
    padded = torch.cat([torch.cat([tokens(1, 9 - row.shape[1], seed=99), row], 1) for row in rows])
    together = model.generate(padded, 30, temperature=0, padding=padding, cached=cached)
    for row, generated in zip(rows, together, strict=True):
        assert torch.equal(model.generate(row, 30, temperature=0)[0, -30:], generated[-30:])


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


def test_ids_beyond_the_vocabulary_and_an_early_end():
    model = small_model()
    with torch.no_grad():
        model.tokens.weight[40:] *= 5
    x = tokens(4, 3)
    assert (model.generate(x, 20, seed=1)[:, 3:] >= 40).any()
    assert (model.generate(x, 20, seed=1, vocab=40)[:, 3:] < 40).all()
    lengths = []
    generated = model.generate(x, 20, temperature=0, until=lambda t: lengths.append(t.shape[1]) or t.shape[1] == 8)
    assert generated.shape == (4, 8)
    assert lengths == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padding": torch.tensor([3, 0])}, "padding must be one number below 3 per row"),
        ({"padding": torch.tensor([1])}, "padding must be one number below 3 per row"),
        ({"vocab": 0}, "vocab must lie between 1 and 50"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        small_model().generate(tokens(2, 3), 2, **arguments)


def test_positions_beyond_the_block():
    with pytest.raises(ValueError, match="positions below block = 24 exist, got 24"):
        small_model().stream(tokens(1, 2), positions=torch.tensor([[3, 24]]))


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
