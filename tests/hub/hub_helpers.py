"""Small models of every scheme."""

from small_models import TINY, randomize, tokens

from spheret import GPT, GPTConfig

__all__ = ["TINY", "randomize", "tiny", "tokens"]


def tiny(scheme, **changes):
    return randomize(GPT(GPTConfig(**{**TINY, "scheme": scheme, **changes}))).eval()
