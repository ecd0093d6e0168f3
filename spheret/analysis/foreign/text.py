"""Text for someone else's decoder, in the ids of its own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spheret.data import Data, open_named
from spheret.data.shards import MANIFEST
from spheret.support.errors import need

if TYPE_CHECKING:
    # importing the hub imports transformers, which takes seconds
    from spheret.hub.open import SavedModel


def open_text(saved: SavedModel, name: str | None, quiet: bool = True) -> Data:
    """A corpus by name, a text, or a prepared directory, in this model's tokens; by default the corpus sotu."""
    if name is None or not (Path(name).expanduser() / MANIFEST).exists():
        return open_named(name or "sotu", saved.tokenizer_spec, quiet)
    data = open_named(name, None, quiet)
    if data.manifest.tokenizer.sha256 != saved.tokenizer.sha256 and not _reads_alike(saved, data):
        raise ValueError(
            f"--data {name} was prepared with another tokenizer than that of {saved.path}: prepare it with "
            f"--tokenizer {saved.tokenizer_spec}, or give the text itself."
        )
    return data


def _reads_alike(saved: SavedModel, data: Data) -> bool:
    """Whether the model's tokenizer gives the same ids as that of the data, for some of its text."""
    theirs, ours, count = data.tokenizer(), saved.tokenizer, min(4096, data.tokens("val"))
    sample = data.decode(data.stream("val").window(0, count))
    return theirs.end_of_text == ours.end_of_text and np.array_equal(theirs.encode(sample), ours.encode(sample))


def first_tokens(saved: SavedModel) -> list[int]:
    """What the tokenizer puts in front of every text, e.g. Gemma's <bos>."""
    library = need("tokenizers", "data").Tokenizer.from_buffer(saved.tokenizer_file)
    library.no_padding()
    marked, plain = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
    found = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
    return marked[:found]


def with_first_tokens(saved: SavedModel, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Windows that begin with the tokens that the tokenizer puts in front of a text."""
    first = first_tokens(saved)
    count = len(first)
    if not count or count >= x.shape[1]:
        return x, y
    start = torch.tensor(first, device=x.device).expand(len(x), -1)
    return torch.cat([start, x[:, :-count]], 1), torch.cat([start, x, y[:, -1:]], 1)[:, 1 : x.shape[1] + 1]
