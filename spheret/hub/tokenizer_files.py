"""A run's tokenizer as a tokenizer.json for transformers. The same text gets the same ids."""

from __future__ import annotations

import json
from pathlib import Path

from spheret.data.records import TOKENIZER, TokenizerRecord
from spheret.data.tokenizers import END_OF_TEXT, GPT2Tokenizer, byte_letters, splits_like_gpt2
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


def is_gpt2(file: bytes) -> bool:
    """Whether a tokenizer.json gives GPT-2's ids: it has the same vocabulary, the same merges and the same words."""
    read = need("tokenizers", "data").Tokenizer.from_buffer
    try:
        tokenizer = read(file)
    except Exception:
        # JSONTokenizer says what is wrong with the file
        return False
    # GPT-2's own takes a second to build
    if tokenizer.get_vocab_size(with_added_tokens=False) != GPT2Tokenizer.vocab_size:
        return False
    definition, gpt2 = (json.loads(each.to_str()) for each in (tokenizer, read(_gpt2().encode())))
    same = all(definition["model"].get(part) == gpt2["model"].get(part) for part in ("vocab", "merges"))
    return same and splits_like_gpt2(definition)


def is_bytes(file: bytes) -> bool:
    """Whether a tokenizer.json gives the ids of our `bytes`: its tokens are the bytes and the end of text."""
    try:
        definition = json.loads(file)
        model, normalizer = definition["model"], definition["normalizer"]
        before = definition["pre_tokenizer"]
        return (
            model["type"] == "BPE"
            and not model["merges"]
            and {letter: model["vocab"].get(letter) for letter in byte_letters().values()}
            == {letter: byte for byte, letter in byte_letters().items()}
            and set(model["vocab"]) <= {*byte_letters().values(), END_OF_TEXT}
            and [(token["content"], token["id"]) for token in definition["added_tokens"]] == [(END_OF_TEXT, 256)]
            and normalizer is None
            and before["type"] == "ByteLevel"
            and before["add_prefix_space"] is False
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        # JSONTokenizer says what is wrong with the file
        return False


def built_name(file: bytes) -> str | None:
    """The name of the tokenizer without a file that gives the same ids as a tokenizer.json; None if there is none."""
    return "bytes" if is_bytes(file) else "gpt2" if is_gpt2(file) else None


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
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
