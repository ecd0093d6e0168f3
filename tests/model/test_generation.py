"""Generation with a cache, with embeddings, and with a smaller vocabulary."""

import pytest
import torch
from small_models import TINY, randomize, tokens

from spheret import GPT, GPTConfig
from spheret.model.gpt import Cache


def small_model(scheme="proj-spheretnorm", **changes):
    return randomize(GPT(GPTConfig(**{**TINY, **changes}, scheme=scheme))).double().eval()


def test_embeddings_and_several_tokens_after_a_cache():
    model, x = small_model(), tokens(2, 12)
    cache = Cache(model.config, 2, x.device, torch.float64)
    parts = [model.stream(model.tokens(x[:, :5]), cache)]
    parts += [model.stream(x[:, a:b], cache) for a, b in ((5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), model.stream(x))
    assert cache.length == 12
    with pytest.raises(ValueError, match=r"or embeddings \(batch, time, \d+\), got \(2, 12, 3\)"):
        model.stream(model.tokens(x)[..., :3])


def test_ids_beyond_the_vocabulary():
    model = small_model()
    with torch.no_grad():
        model.tokens.weight[40:] *= 5
    x = tokens(4, 3)
    assert (model.generate(x, 20, seed=1)[:, 3:] >= 40).any()
    assert (model.generate(x, 20, seed=1, vocab=40)[:, 3:] < 40).all()
