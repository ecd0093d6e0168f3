"""The array encoder gives the same ids as the tokenizer's library."""

from __future__ import annotations

import numpy as np
import pytest
from data_helpers import documents
from hypothesis import given, settings
from hypothesis import strategies as st

from spheret.data import words
from spheret.data.corpora import resolve
from spheret.data.tokenizers import GPT2Tokenizer, Tokenizer, load

settings.register_profile("words", derandomize=True, deadline=None, max_examples=300)
PROFILE = settings.get_profile("words")

# texts that the expression treats specially, and similar ones
PARTS = [
    "'s",
    "'ll",
    "'re",
    "'ve",
    "'",
    "''",
    "'S",
    "don't",
    "s",
    "ll",
    " ",
    "  ",
    "\n",
    " \n",
    "\t",
    "\r\n",
    "a",
    "Word",
]
PARTS += [
    "1",
    "23",
    "!",
    "...",
    "é",
    "\u2019",
    "中文",
    "\x00",
    "\x1c",
    "\x1f",
    "\x85",
    "\u00a0",
    "\u2003",
    "\u200b",
    "🙂",
    "<|endoftext|>",
]
TEXTS = st.one_of(st.lists(st.sampled_from(PARTS), min_size=1, max_size=14).map("".join), st.text(min_size=1))

GPT2 = GPT2Tokenizer()
BPE = load("bpe:400", documents())


def one_by_one(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """Return the ids by the tokenizer's `encode`, one document at a time."""
    return [id for text in texts for id in [*tokenizer.encode(text).tolist(), tokenizer.end_of_text]]


@pytest.mark.parametrize("tokenizer", [GPT2, BPE], ids=["gpt2", "bpe"])
@PROFILE
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_ids_are_the_tokenizers_own(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert tokenizer.encode_documents([text.encode() for text in texts]).tolist() == one_by_one(tokenizer, texts)


def test_gpt2_equals_tiktoken_on_a_thousand_documents() -> None:
    read = [text for name in ("sotu", "stdlib") for text in resolve(name).read(None) if text]
    # each half of a file is a document
    texts = [part for text in read for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    valid = [text for text in texts if text.decode("utf-8", "ignore").encode() == text][:1000]
    assert len(valid) == 1000
    own = [id for text in valid for id in [*GPT2.encoding.encode_ordinary(text.decode()), 50256]]
    assert np.array_equal(GPT2.encode_documents(valid), np.array(own))


def test_windows_change_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*documents(40), "unbroken" * 500, "x"]
    expected = one_by_one(GPT2, texts)
    for size in (1, 7, 64, 300):
        monkeypatch.setattr(words, "_WINDOW_BYTES", size)
        assert GPT2.encode_documents([text.encode() for text in texts]).tolist() == expected


def test_a_full_table_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_KEPT_WORDS", 10)
    tokenizer = GPT2Tokenizer()
    for texts in ([f"word{n}x{n}" for n in range(50)], documents(10), documents(20)):
        assert tokenizer.encode_documents([text.encode() for text in texts]).tolist() == one_by_one(tokenizer, texts)


def test_words_that_share_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_TABLE_BITS", 2)
    tokenizer = GPT2Tokenizer()
    for _ in range(3):
        texts = documents(60)
        assert tokenizer.encode_documents([text.encode() for text in texts]).tolist() == one_by_one(tokenizer, texts)


@PROFILE
@given(text=TEXTS, size=st.integers(1, 12))
def test_pieces_join_to_the_text_and_its_ids(text: str, size: int) -> None:
    parts = list(words.pieces(text, size))
    assert "".join(parts) == text
    # only 2 x size characters without a word end are cut inside a word
    if all(len(part) < 2 * size for part in parts):
        own = [id for part in parts for id in GPT2.encoding.encode_ordinary(part)]
        assert own == GPT2.encoding.encode_ordinary(text)
