"""n-gram models, a scale that people can read beside a loss: what counting the tokens that a model saw would give.

Interpolated Witten-Bell smoothing (Witten and Bell 1991). A context h was seen c(h) times, before T(h) different
tokens, and c(h w) times before w:

    p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)),   h' = h without its oldest token

Below the empty context every token of the vocabulary is equally likely. A context that was not seen leaves the
probability to the shorter one. At the beginning of a window, where a model sees few tokens, contexts are short too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from spheret.data import Data
from spheret.runs.config import RunConfig
from spheret.support.documents import Document, Positive, Record, Sha256, Text

ORDERS, NAMES = (2, 3, 4), ("bigram", "trigram", "4-gram")
# counting them takes some ten seconds
MOST_TOKENS = 1 << 24
Settings = tuple[str | None, int, int, int, int]


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


class NgramRecord(Record):
    """The losses of n-gram models beside one group of a study, and what they depend on.

    data: the hash of the manifest. windows: of one update.
    """

    group: Text
    data: Sha256
    block: Positive
    windows: Positive
    steps: Positive
    eval_windows: Positive
    losses: dict[str, float]

    @property
    def settings(self) -> Settings:
        return self.data, self.block, self.windows, self.steps, self.eval_windows


class NgramsRecord(Record):
    """What stands beside a results.jsonl."""

    tables: list[NgramRecord]
    format: str = "spheret-ngrams"
    version: int = 1


NGRAMS = Document(NgramsRecord, "race", "delete it and run the same race or study again")


def ngrams_file(results: Path) -> Path:
    """The place of the n-gram losses beside a results.jsonl."""
    return results.with_suffix(".ngrams.json")


def read_ngrams(results: Path) -> list[NgramRecord]:
    """The n-gram losses beside a results.jsonl; empty if there are none."""
    path = ngrams_file(results)
    return NGRAMS.read(path).tables if path.is_file() else []


def settings_of(config: RunConfig, data_sha256: str | None) -> Settings:
    """What the n-gram losses of a run depend on, as in `NgramRecord.settings`."""
    block, train = config.model.block, config.train
    return data_sha256, block, train.tokens_per_update // block, train.steps, config.evaluation.eval_windows


def ngrams_beside(group: str, config: RunConfig, data: Data, data_sha256: str) -> NgramRecord | None:
    """The n-gram losses of a group; None if counting its tokens would take long.

    The models are fitted on the windows that a model sees, and read the same validation windows, each for itself.
    """
    _, block, windows, steps, eval_windows = settings_of(config, data_sha256)
    if steps * windows * block > MOST_TOKENS:
        return None
    loader = data.loader(block, windows, seed=config.train.seed)
    seen = windows_of(loader.batch(step) for step in range(steps))
    asked = windows_of(data.validation(block, 64, eval_windows))
    losses = ngram_losses(seen, asked, data.vocab_size)
    by_name = dict(zip(NAMES, losses, strict=True))
    return NgramRecord(group, data_sha256, block, windows, steps, eval_windows, by_name)
