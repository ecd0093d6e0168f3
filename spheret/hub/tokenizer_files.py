"""A run's tokenizer as a tokenizer.json for transformers. The same text gets the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spheret.data.manifest import TOKENIZER, TokenizerRecord
from spheret.data.tokenizers import END_OF_TEXT, GPT2Tokenizer, byte_letters
from spheret.support.errors import need


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]], words: bool) -> str:
    """The JSON of a byte-level BPE. `words` splits text into GPT-2's words first."""
    library = need("tokenizers", "data")
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([library.AddedToken(END_OF_TEXT, special=True)])
    return tokenizer.to_str()


def _bytes() -> str:
    return _byte_level(
        {letter: byte for byte, letter in byte_letters().items()} | {END_OF_TEXT: 256}, [], words=False
    )


def _gpt2() -> str:
    tokenizer = GPT2Tokenizer()
    # the first line is a version; a merge is two parts with a blank between them
    lines = tokenizer.merges().split("\n")[1:]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines) if right]
    tokens = [*byte_letters().values(), *(left + right for left, right in merges), END_OF_TEXT]
    return _byte_level({token: number for number, token in enumerate(tokens)}, merges, words=True)


# tokenizers for which a run keeps a name and no file
BUILT = {"bytes": _bytes, "gpt2": _gpt2}


def built_name(file: bytes) -> str | None:
    """The name of the tokenizer without a file that gives the same ids as a tokenizer.json; None if there is none."""
    library = need("tokenizers", "data").Tokenizer
    tokenizer = library.from_buffer(file)
    name = {257: "bytes", GPT2Tokenizer.vocab_size: "gpt2"}.get(tokenizer.get_vocab_size())
    try:
        built = None if name is None else library.from_str(BUILT[name]())
    except ImportError:
        # without the packages of GPT-2's tokenizer the file is as good
        return None
    return name if built is not None and _rules(tokenizer) == _rules(built) else None


def _rules(tokenizer: Any) -> tuple[object, ...]:
    """What decides the ids of a byte-level BPE."""
    definition = json.loads(tokenizer.to_str())
    rules = [definition[part] for part in ("normalizer", "pre_tokenizer")]
    return tokenizer.get_vocab(), definition["model"].get("merges"), *rules


def write_tokenizer(directory: Path, described: TokenizerRecord, file: bytes | None, block: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for transformers.

    described: the tokenizer's entry in the run's config.json.
    file: the run's own tokenizer.json, which is copied; None builds one from the tokenizer's name.
    """
    content = file if file is not None else BUILT[described.name]().encode()
    library = need("tokenizers", "data").Tokenizer.from_buffer(content)
    end = library.id_to_token(described.end_of_text)
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
    (directory / "tokenizer_config.json").write_bytes(json.dumps(config, indent=1).encode() + b"\n")
