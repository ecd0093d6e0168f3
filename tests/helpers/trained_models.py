"""Small models that the tests of `spheret inspect` share, trained for a few steps on real text."""

from functools import lru_cache

import torch

from spheret import GPT, GPTConfig, parameter_groups
from spheret.data import cached

VOCAB = 320


def config(scheme, layers=2, width=32, block=64, **options):
    return GPTConfig(
        layers=layers,
        heads=4,
        width=width,
        block=block,
        vocab=VOCAB,
        head_bias="zero",
        scheme=scheme,
        scheme_options=options,
    )


@lru_cache
def windows(count=4, block=64):
    """Inputs and targets of some validation windows."""
    x, y, _ = next(iter(cached("sotu", "bytes").validation(block, count, windows=count)))
    return x, y


@lru_cache(maxsize=32)
def trained(scheme, layers=2, width=32, steps=15, options=()):
    """A model of that scheme after a few steps. Tests share it and must not change it."""
    torch.manual_seed(0)
    model = GPT(config(scheme, layers, width, **dict(options)))
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-3)
    loader = cached("sotu", "bytes").loader(64, 4)
    for step in range(steps):
        model(*loader.batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.constrain()
    return model.eval()
