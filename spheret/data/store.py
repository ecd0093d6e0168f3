"""A prepared directory, opened: its manifest, its ids, its tokenizer, and windows for training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spheret.data import shards, tokenizers
from spheret.data.manifest import Manifest
from spheret.support.errors import unknown

# torch is imported by the methods that return tensors, so that `spheret prepare` starts without it
if TYPE_CHECKING:
    import torch

    from spheret.data.loader import Loader, Stream, Validation


@dataclass(frozen=True)
class Data:
    """Prepared shards. Their sizes were checked against the manifest; their bytes are checked at first use.

    Args:
        path: the directory.
        manifest: what its manifest.json holds.
    """

    path: Path
    manifest: Manifest

    @property
    def vocab_size(self) -> int:
        """The number of ids of the tokenizer."""
        return self.manifest.tokenizer.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """The rows of a model's embedding, which are the vocabulary size rounded up to a multiple of 64."""
        return tokenizers.padded(self.vocab_size)

    @property
    def end_of_text(self) -> int:
        """The id that follows every document."""
        return self.manifest.tokenizer.end_of_text

    def tokens(self, split: str = "train") -> int:
        """Return the number of ids in a split."""
        if split not in shards.SPLITS:
            raise unknown("split", split, shards.SPLITS)
        return self.manifest.tokens[split]

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Return the tokenizer that wrote the data. Raises if it has changed since."""
        return tokenizers.stored(self.path, self.manifest.tokenizer)

    def decode(self, ids: Sequence[int] | np.ndarray | torch.Tensor) -> str:
        """Return the text of some ids."""
        return self._tokenizer.decode(ids if isinstance(ids, Sequence | np.ndarray) else ids.cpu().numpy())

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return self.tokenizer()

    def counts(self) -> torch.Tensor:
        """Return how often each id occurs in the train split: (vocab_size,) int64."""
        import torch

        return torch.from_numpy(shards.read_counts(self.path, self.manifest).astype(np.int64))

    def unigram_entropy(self) -> float:
        """Return the unigram entropy of the train split in nats: the loss of knowing only token frequencies."""
        counts = self.counts().double()
        share = counts[counts > 0] / counts.sum()
        return float(-(share * share.log()).sum())

    def stream(self, split: str = "train") -> Stream:
        """Return the ids of a split as one memory-mapped sequence over its shards."""
        from spheret.data.loader import Stream

        self.tokens(split)
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        records = self.manifest.shards[split]
        paths = [self.path / shard.name for shard in records]
        return Stream(paths, dtype, self.vocab_size, records)

    def loader(
        self, block: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1, accumulation: int = 1
    ) -> Loader:
        """Return training windows as a pure function of the step.

        Args:
            block: the tokens of a window.
            batch_size: the windows per process and micro-batch.
            seed: of the order of the windows.
            rank: the number of this process, from 0.
            world_size: how many processes there are.
            accumulation: the micro-batches of an update.
        """
        from spheret.data.loader import Loader

        self._check_window("train", block)
        return Loader(self.stream(), block, batch_size, seed, rank, world_size, accumulation)

    def validation(self, block: int, batch_size: int, windows: int | None = None) -> Validation:
        """Return fixed windows of the validation split.

        Args:
            block: the tokens of a window.
            batch_size: the windows of a batch.
            windows: how many, spread over the whole split; None takes all.
        """
        from spheret.data.loader import Validation

        self._check_window("val", block)
        return Validation(self.stream("val"), block, batch_size, windows, self.end_of_text)

    def _check_window(self, split: str, block: int) -> None:
        if block < 1:
            raise ValueError(f"block must be at least 1 token, got {block}.")
        if self.tokens(split) <= block:
            raise ValueError(
                f"the {split} split of {self.path} has {self.tokens(split):,} tokens, fewer than one window of "
                f"{block:,} and its next token: take a smaller block, more text"
                + (", or a larger share for validation (spheret prepare --val-fraction)." if split == "val" else ".")
            )


def open_data(path: str | Path) -> Data:
    """Open a directory that `spheret prepare` wrote. Raises if the size of a file differs from the manifest.

    Args:
        path: the directory.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise FileNotFoundError(f"no data directory at {directory}: make it with spheret prepare CORPUS --out DIR.")
    manifest = shards.read_manifest(directory)
    shards.check_sizes(directory, manifest)
    return Data(directory, manifest)
