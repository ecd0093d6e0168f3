"""The losses of n-gram models beside a race or a study: a scale that people can read."""

from __future__ import annotations

from pathlib import Path

from spheret.data import Data
from spheret.data.ngrams import ngram_losses, windows_of
from spheret.runs.config import RunConfig
from spheret.support.documents import Document, Positive, Record, Sha256, Text

NAMES = ("bigram", "trigram", "4-gram")
# counting them takes some ten seconds
MOST_TOKENS = 1 << 24
Settings = tuple[str | None, int, int, int, int]


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
