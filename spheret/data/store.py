"""A prepared directory, opened: its manifest, its ids, its tokenizer, and windows to train and validate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spheret.data import shards, tokenizers
from spheret.data.loader import Loader, Stream, Validation
from spheret.support.errors import unknown


@dataclass(frozen=True)
class Data:
    """Shards whose sizes were checked against their manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer has."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def padded_vocab_size(self) -> int:
        """The rows of a model's embedding: the vocabulary up to a multiple of 64."""
        return tokenizers.padded(self.vocab_size)

    @property
    def end_of_text(self) -> int:
        """The id that ends every document."""
        return int(self.manifest["tokenizer"]["end_of_text"])

    def tokens(self, split: str = "train") -> int:
        """How many ids a split has."""
        if split not in shards.SPLITS:
            raise unknown("split", split, shards.SPLITS)
        return int(self.manifest["tokens"][split])

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer the data was written with, checked to be the same."""
        return tokenizers.stored(self.path, self.manifest["tokenizer"])

    def decode(self, ids: Sequence[int] | np.ndarray | torch.Tensor) -> str:
        """The text of some ids."""
        return self._tokenizer.decode(ids.cpu().numpy() if isinstance(ids, torch.Tensor) else ids)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return self.tokenizer()

    def counts(self) -> torch.Tensor:
        """How often every id occurs in the train split: (vocab_size,) int64."""
        return torch.from_numpy(np.fromfile(self.path / shards.COUNTS, dtype="<u8").astype(np.int64))

    def log_unigram(self) -> torch.Tensor:
        """log((count + 1) / (tokens + vocab_size)) of every id in the train split: (vocab_size,) float32."""
        smoothed = self.counts().double() + 1
        return (smoothed / smoothed.sum()).log().float()

    def stream(self, split: str = "train") -> Stream:
        """A split's ids as one memory-mapped sequence over its shards."""
        self.tokens(split)
        dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        paths = [self.path / shard["name"] for shard in self.manifest["shards"][split]]
        return Stream(paths, dtype, self.vocab_size)

    def loader(
        self,
        block: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        split: str = "train",
    ) -> Loader:
        """Training windows as a pure function of the step; `batch_size` counts those of all ranks together."""
        self._check_window(split, block)
        return Loader(self.stream(split), block, batch_size, seed, rank, world_size, accumulation)

    def validation(self, block: int, batch_size: int, windows: int | None = None) -> Validation:
        """Fixed windows of the validation split, at most `windows` of them, spread over all of it."""
        self._check_window("val", block)
        return Validation(self.stream("val"), block, batch_size, windows, self.end_of_text)

    def _check_window(self, split: str, block: int) -> None:
        if block < 1:
            raise ValueError(f"block must be at least 1 token, got {block}.")
        if self.tokens(split) <= block:
            raise ValueError(
                f"the {split} split of {self.path} has {self.tokens(split):,} tokens, fewer than one window of "
                f"{block:,} and its next token: take a smaller block, more text"
                + (", or a larger --val-fraction." if split == "val" else ".")
            )


def open_data(path: str | Path) -> Data:
    """Open what `spheret prepare` wrote: every file's size is compared with the manifest before it is mapped."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise FileNotFoundError(f"no data directory at {directory}: make it with spheret prepare CORPUS --out DIR.")
    manifest = shards.read_manifest(directory)
    shards.check_sizes(directory, manifest)
    return Data(directory, manifest)
