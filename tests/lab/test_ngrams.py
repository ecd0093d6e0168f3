"""n-gram losses against the formula in plain Python, and on the bytes that a model of the study sees."""

import math
from collections import Counter

import numpy as np
import pytest

from spheret.data import cached
from spheret.lab.ngrams import ngram_losses, ngram_table


def slow_loss(train, held_out, vocab, order):
    """Interpolated Witten-Bell, as it is printed."""
    pairs = [Counter() for _ in range(order)]
    for window in train:
        for place, token in enumerate(window):
            for past in range(min(place, order - 1) + 1):
                pairs[past][tuple(window[place - past : place]), token] += 1

    def probability(context, token):
        shorter = probability(context[1:], token) if context else 1 / vocab
        after = {w: n for (h, w), n in pairs[len(context)].items() if h == context}
        if not after:
            return shorter
        total, kinds = sum(after.values()), len(after)
        return (after.get(token, 0) + kinds * shorter) / (total + kinds)

    losses = [
        -math.log(probability(tuple(window[max(0, place - order + 1) : place]), window[place]))
        for window in held_out
        for place in range(1, len(window))
    ]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("vocab", [6, 60])
def test_the_formula(vocab):
    """With few tokens contexts repeat; with many, most of the contexts that are asked for were never seen."""
    rng = np.random.default_rng(0)
    train, held_out = rng.zipf(1.5, (9, 20)) % vocab, rng.zipf(1.5, (3, 12)) % vocab
    orders = (1, 2, 3, 4, 5)
    expected = [slow_loss(train.tolist(), held_out.tolist(), vocab, order) for order in orders]
    assert ngram_losses(train, held_out, vocab, orders) == pytest.approx(expected, abs=1e-12)
    assert ngram_losses(train, held_out, vocab, (3,)) == pytest.approx(expected[2:3], abs=1e-12)


def test_a_text_that_repeats_is_known():
    """The first token of a window has no context, so the second is predicted from one token."""
    text = np.tile(np.arange(5), 2000)
    bigram, trigram = ngram_losses(text[None, :9000], text[None, 9000:], 5, (2, 3))
    assert 0 < trigram < bigram < 0.01


def test_the_bytes_of_a_study():
    """300 updates of 1,024 bytes, 128 validation windows of 128: between the second and the third are our models."""
    table = ngram_table(cached("sotu"), block=128, windows_per_update=8, steps=300, eval_windows=128)
    assert table == pytest.approx({"bigram": 2.33, "trigram": 1.85, "4-gram": 1.45}, abs=0.006)
