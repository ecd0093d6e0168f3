"""n-gram models, a scale that people can read beside a loss: what counting the tokens that a model saw would give.

Interpolated Witten-Bell smoothing (Witten and Bell 1991). A context h was seen c(h) times, before T(h) different
tokens, and c(h w) times before w:

    p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)),   h' = h without its oldest token

Below the empty context every token of the vocabulary is equally likely. A context that was not seen leaves the
probability to the shorter one. At the beginning of a window, where a model sees few tokens, contexts are short too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

# bigram, trigram, 4-gram
ORDERS = (2, 3, 4)


def _numbers(*keys: np.ndarray) -> list[np.ndarray]:
    """The number of each key among the different keys of all arrays."""
    flat = np.concatenate([each.ravel() for each in keys])
    numbers = np.unique(flat, return_inverse=True)[1]
    parts = np.split(numbers, np.cumsum([each.size for each in keys])[:-1])
    return [part.reshape(each.shape) for part, each in zip(parts, keys, strict=True)]


def ngram_losses(train: np.ndarray, held_out: np.ndarray, vocab: int, orders: Sequence[int] = ORDERS) -> list[float]:
    """The mean loss of n-gram models in nats per token, one per order.

    Args:
        train: windows (n, length) of the tokens that are counted.
        held_out: windows (n, length) of which all tokens but the first of each are predicted.
        vocab: how many tokens there are.
        orders: an n-gram of order 3 looks at two tokens before the one that it predicts.
    """
    seen, asked = (np.asarray(windows, dtype=np.int64) for windows in (train, held_out))
    # the number of each token's context, the same in both parts for the same context
    seen_h, asked_h = np.zeros_like(seen), np.zeros_like(asked)
    probability = np.full(asked.shape, 1 / vocab)
    losses = {}
    for order in range(1, max(orders) + 1):
        past = order - 1
        if past:
            # the context grows by the token before it
            seen_h, asked_h = _numbers(
                seen_h[:, 1:] * vocab + seen[:, : seen.shape[1] - past],
                asked_h[:, 1:] * vocab + asked[:, : asked.shape[1] - past],
            )
        # tokens with fewer tokens before them keep the probability of the shorter context
        probability[:, past:] = _interpolated(
            seen[:, past:], asked[:, past:], seen_h, asked_h, vocab, probability[:, past:]
        )
        losses[order] = float(-np.log(probability[:, 1:]).mean())
    return [losses[order] for order in orders]


def _interpolated(
    seen: np.ndarray, asked: np.ndarray, seen_h: np.ndarray, asked_h: np.ndarray, vocab: int, shorter: np.ndarray
) -> np.ndarray:
    """p(w | h) of the tokens `asked` in their contexts `asked_h`, where `shorter` is p(w | h')."""
    contexts = 1 + max(seen_h.max(initial=0), asked_h.max(initial=0))
    seen_pairs, asked_pairs = _numbers(seen_h * vocab + seen, asked_h * vocab + asked)
    total = np.bincount(seen_h.ravel(), minlength=contexts)[asked_h]
    own = np.bincount(seen_pairs.ravel(), minlength=1 + asked_pairs.max(initial=0))[asked_pairs]
    # one occurrence of each different pair
    first = np.unique(seen_pairs, return_index=True)[1]
    kinds = np.bincount(seen_h.ravel()[first], minlength=contexts)[asked_h]
    return np.where(total > 0, (own + kinds * shorter) / np.maximum(total + kinds, 1), shorter)


def windows_of(batches: Iterable[Sequence[Tensor]]) -> np.ndarray:
    """Windows (n, block + 1) from batches that begin with inputs and targets."""
    return np.concatenate([np.concatenate([np.asarray(x), np.asarray(y)[:, -1:]], 1) for x, y, *_ in batches])
