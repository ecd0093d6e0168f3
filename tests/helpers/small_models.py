"""Small models with random weights, which reveal mistakes, and tokens for them."""

import torch

# with the paper's head, which GPT-2 and Llama have as well
TINY = {"layers": 2, "heads": 2, "width": 16, "block": 24, "vocab": 50, "head": "tied", "head_bias": "none"}


def randomize(model, scale=0.2):
    """Random weights and biases of size `scale`, gains around 1. At the usual start a wrong GELU hardly shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise + (1 if p.dim() == 1 and "weight" in name else 0))
    return model


def tokens(batch=3, time=24, vocab=50, seed=0):
    return torch.randint(vocab, (batch, time), generator=torch.Generator().manual_seed(seed))
