"""A run's tokenizer as the tokenizer.json that transformers reads, with the same ids for the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spheret.data.shards import TOKENIZER
from spheret.data.tokenizers import END_OF_TEXT, GPT2Tokenizer, byte_letters, splits_like_gpt2
from spheret.support.errors import need


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]], words: bool) -> str:
    """A byte-level BPE; `words` cuts text at GPT-2's word ends first."""
    library = need("tokenizers", "data")
    made = library.Tokenizer(library.models.BPE(vocabulary, merges))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([library.AddedToken(END_OF_TEXT, special=True)])
    return made.to_str()


def _bytes() -> str:
    return _byte_level(
        {letter: byte for byte, letter in byte_letters().items()} | {END_OF_TEXT: 256}, [], words=False
    )


def _gpt2() -> str:
    tokenizer = GPT2Tokenizer()
    letters = byte_letters()
    vocabulary = {
        "".join(letters[byte] for byte in token): rank for token, rank in tokenizer.encoding._mergeable_ranks.items()
    }
    lines = tokenizer._vocabulary().split("\n")[1:]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines) if right]
    return _byte_level(vocabulary | {END_OF_TEXT: tokenizer.end_of_text}, merges, words=True)


# tokenizers that a run names without keeping a file
BUILT = {"bytes": _bytes, "gpt2": _gpt2}


def is_gpt2(file: bytes) -> bool:
    """Whether a tokenizer.json gives GPT-2's ids: its vocabulary and merges on its words."""
    read = need("tokenizers", "data").Tokenizer.from_buffer
    theirs, ours = (json.loads(read(content).to_str()) for content in (file, _gpt2().encode()))
    parts = [[made["model"].get(part) for part in ("vocab", "merges")] for made in (theirs, ours)]
    return parts[0] == parts[1] and splits_like_gpt2(theirs)


def write_tokenizer(directory: Path, described: dict[str, Any], file: bytes | None, block: int) -> None:
    """tokenizer.json, the run's own bytes where it has them, and what makes transformers read it as it is."""
    content = file if file is not None else BUILT[described["name"]]().encode()
    library = need("tokenizers", "data").Tokenizer.from_buffer(content)
    end = library.id_to_token(described["end_of_text"])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        "model_max_length": block,
        "clean_up_tokenization_spaces": False,
    }
    (directory / TOKENIZER).write_bytes(content)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
