"""Byte-level BPE with arrays: arithmetic on whole arrays cuts text into words, and known words are looked up.

GPT-2's vocabulary works on the words of one regular expression,

    's | 't | 're | 've | 'm | 'll | 'd | ?letters | ?digits | ?others | spaces not before a word | space

A text has few distinct words. Nearly all of the work is therefore to find where words begin and to look up their ids.
Both are done here for thousands of words at once. The tokenizer's library encodes the rest: words that are new, and
stretches with characters outside ASCII, whose classes only the library knows. The ids are the library's own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

# it stands between documents: a byte that no UTF-8 text contains
SEPARATOR = b"\xff"
_LETTER, _DIGIT, _OTHER, _SPACE, _END, _FOREIGN = range(6)
_CLASSES = np.full(256, _OTHER, dtype=np.uint8)
_CLASSES[[*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)]] = _LETTER
_CLASSES[[*range(ord("0"), ord("9") + 1)]] = _DIGIT
_CLASSES[[9, 10, 11, 12, 13, 32]] = _SPACE
_CLASSES[128:] = _FOREIGN
_CLASSES[SEPARATOR[0]] = _END
_TRANSLATION = _CLASSES.tobytes()

# text of this size and everything computed from it fit into the processor's caches
_WINDOW_BYTES = 1 << 16
# a place between two words that no word of the expression spans
_CUT = re.compile(rb"(?=\xff)|[!-~](?=[ \n][!-~])")
# a word of up to this many bytes is looked up by two 64-bit numbers: its bytes, with its length in the top byte
_KEY_BYTES = 15
_TABLE_BITS = 18
# a window has fewer than 2^24 ids
_COUNT_BITS = 24
# a word that the library encodes alone is kept up to this many bytes
_LONGEST_KEPT = 64
_LINE = re.compile(rb" ?[!-~]+")
_KEPT_WORDS = 1 << 18
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)

# a longer document is encoded in pieces of about this many characters, so that memory stays bounded
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


def _windows(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the bounds of windows of about _WINDOW_BYTES, cut between words. Without such a place they are longer."""
    start = 0
    while start < len(data):
        cut = _CUT.search(data, start + _WINDOW_BYTES)
        end = cut.end() if cut else len(data)
        yield start, end
        start = end


def word_starts(text: bytes) -> np.ndarray:
    """Return where words begin: (words,) int64. A stretch between two cuts with bytes outside ASCII is one word."""
    data = np.frombuffer(text, dtype=np.uint8)
    classes = np.frombuffer(text.translate(_TRANSLATION), dtype=np.uint8)
    begins = np.empty(len(data), dtype=bool)
    begins[0] = True
    np.not_equal(classes[1:], classes[:-1], out=begins[1:])
    wordlike = classes[1:] < _SPACE
    # the last of several white-space characters is a word alone, or begins the next word if it is a space
    begins[:-1] |= (classes[:-1] == _SPACE) & wordlike
    begins[1:] &= ~((data[:-1] == 32) & wordlike)
    _contractions(data, classes, begins)
    if classes.max() == _FOREIGN:
        _merge_foreign(data, classes, begins)
    return np.flatnonzero(begins)


def _contractions(data: np.ndarray, classes: np.ndarray, begins: np.ndarray) -> None:
    """Mark 's 't 'm 'd 're 've 'll as words of their own where a word begins with the apostrophe."""
    quotes = np.flatnonzero(data[:-1] == ord("'"))
    quotes = quotes[begins[quotes] & (classes[quotes + 1] == _LETTER)]
    if not quotes.size:
        return
    first = data[quotes + 1]
    second = data[np.minimum(quotes + 2, len(data) - 1)] * (quotes + 2 < len(data))
    short = (first == ord("s")) | (first == ord("t")) | (first == ord("m")) | (first == ord("d"))
    long = ((first == ord("r")) | (first == ord("v"))) & (second == ord("e"))
    long |= (first == ord("l")) & (second == ord("l"))
    begins[quotes[short | long] + 1] = False
    after = np.concatenate([quotes[short] + 2, quotes[long] + 3])
    begins[after[after < len(data)]] = True


def _merge_foreign(data: np.ndarray, classes: np.ndarray, begins: np.ndarray) -> None:
    """Join every stretch between two cuts that has bytes outside ASCII into one word."""
    printable = (data > 32) & (data < 127)
    cut = np.zeros(len(data), dtype=bool)
    cut[1:-1] = ((data[1:-1] == 32) | (data[1:-1] == 10)) & printable[:-2] & printable[2:]
    # the separator of documents is a word of its own
    cut |= classes == _END
    cut[1:] |= classes[:-1] == _END
    cut[0] = True
    stretch = np.cumsum(cut) - 1
    touched = np.zeros(int(stretch[-1]) + 1, dtype=bool)
    touched[stretch[classes == _FOREIGN]] = True
    begins &= cut | ~touched[stretch]


class WordEncoder:
    """Documents to ids, each followed by the end of text, exactly as `encode` gives them one by one.

    Faster than `tiktoken.encode_ordinary_batch` with the same number of cores: docs/data.md has the measurement.
    """

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: Mapping[bytes, int], end_of_text: int) -> None:
        self._encode, self._end_of_text = encode, end_of_text
        self._vocabulary = {**vocabulary, SEPARATOR: end_of_text}
        # one table per thread: a table cannot be read while another thread writes to it
        self._local = threading.local()

    def __call__(self, documents: Sequence[bytes]) -> np.ndarray:
        """Return the ids of all documents in order: (ids,) uint32."""
        if not documents:
            return np.zeros(0, dtype=np.uint32)
        data = SEPARATOR.join([*documents, b""])
        table = getattr(self._local, "table", None)
        if table is None or table.full():
            table = self._local.table = _Table(self._encode, self._vocabulary)
        parts: list[np.ndarray] = []
        for start, end in _windows(data):
            # without a place to cut the window is long, and the arrays would take ten times its size
            if end - start > 8 * _WINDOW_BYTES:
                parts += self._encode_by_library(data[start:end])
            else:
                parts.append(table.ids(data[start:end]))
        return np.concatenate(parts)

    def _encode_by_library(self, data: bytes) -> Iterator[np.ndarray]:
        for number, text in enumerate(data.split(SEPARATOR)):
            if number:
                yield np.array([self._end_of_text], dtype=np.uint32)
            for part in pieces(text.decode()):
                yield np.array(self._encode(part), dtype=np.uint32)


class _Table:
    """The ids of known words by their bytes: in arrays with two slots per word, else in a dictionary."""

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: Mapping[bytes, int]) -> None:
        self._encode, self._vocabulary = encode, vocabulary
        size = 1 << _TABLE_BITS
        self._low, self._high = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=np.uint64)
        # a word's ids are pool[place : place + count], with place and count in one number; id n stands at place n
        self._where = np.zeros(size, dtype=np.int64)
        self._pool = np.arange(max(vocabulary.values()) + 1, dtype=np.uint32)
        self._used = len(self._pool)
        self._most_ids = self._used + 8 * _KEPT_WORDS
        self._known: dict[bytes, int] = {}
        (self._line_end,) = encode("\n")
        words = [word for word in vocabulary if len(word) <= _KEY_BYTES]
        lengths = np.array([len(word) for word in words])
        low, high, slots = _keys(b"".join(words), np.cumsum(lengths) - lengths, lengths)
        self._low[slots], self._high[slots] = low, high
        self._where[slots] = np.array([vocabulary[word] for word in words]) << _COUNT_BITS | 1

    def full(self) -> bool:
        """Return whether the table has learnt more words than it should keep in memory."""
        return len(self._known) > _KEPT_WORDS or self._used > self._most_ids

    def ids(self, data: bytes) -> np.ndarray:
        """Return the ids of a window: (ids,) uint32."""
        starts = word_starts(data)
        lengths = np.diff(starts, append=len(data))
        low, high, slots = _keys(data, starts, lengths)
        # every slot is in range, so clipping changes none of them, and it is faster than checking
        where = self._where.take(slots, mode="clip")
        missed = np.flatnonzero(
            (self._low.take(slots, mode="clip") != low) | (self._high.take(slots, mode="clip") != high)
        )
        if missed.size:
            # look in the second slot of the word
            low, high, slots = low[missed], high[missed], slots[missed] ^ (1 << _TABLE_BITS - 1)
            where[missed] = self._where[slots]
            unknown = (self._low[slots] != low) | (self._high[slots] != high)
            missed, low, high, slots = missed[unknown], low[unknown], high[unknown], slots[unknown]
        if missed.size:
            where[missed] = self._learn(data, starts[missed], lengths[missed])
            short = lengths[missed] <= _KEY_BYTES
            low, high, slots, fresh = low[short], high[short], slots[short], where[missed][short]
            # a word takes its first slot if that is free, otherwise its second, and replaces the word there
            first = slots ^ (1 << _TABLE_BITS - 1)
            slots = np.where(self._where[first] == 0, first, slots)
            self._low[slots], self._high[slots], self._where[slots] = low, high, fresh
        places, counts = where >> _COUNT_BITS, where & (1 << _COUNT_BITS) - 1
        ends = np.cumsum(counts)
        return self._pool[np.arange(ends[-1]) + np.repeat(places - ends + counts, counts)]

    def _learn(self, data: bytes, starts: np.ndarray, lengths: np.ndarray) -> list[int]:
        """Return place and count of the ids of words that the arrays do not hold."""
        spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        words = [data[start:end] for start, end in spans]
        known = self._known
        lines: list[bytes] = []
        others: list[bytes] = []
        for word in dict.fromkeys(words):
            if word not in known:
                single = self._vocabulary.get(word)
                if single is not None:
                    known[word] = single << _COUNT_BITS | 1
                else:
                    (lines if _LINE.fullmatch(word) else others).append(word)
        # printable words are encoded in one call, one word per line: no word of the expression spans two lines
        fresh = np.array(self._encode(b"\n".join([*lines, b""]).decode()) if lines else [], dtype=np.uint32)
        ends = np.flatnonzero(fresh == self._line_end)
        begins = np.concatenate([ends[:0], [0], ends[:-1] + 1]) if lines else ends
        places = (self._keep(fresh) + begins) << _COUNT_BITS | ends - begins
        known.update(zip(lines, places.tolist(), strict=True))
        for word in others:
            ids = np.array(self._encode(word.decode()), dtype=np.uint32)
            known[word] = self._keep(ids) << _COUNT_BITS | len(ids)
        places_and_counts = [known[word] for word in words]
        for word in others:
            if len(word) > _LONGEST_KEPT:
                del known[word]
        return places_and_counts

    def _keep(self, ids: np.ndarray) -> int:
        """Add ids to the pool. Returns their place."""
        place, self._used = self._used, self._used + len(ids)
        if self._used > len(self._pool):
            self._pool = np.concatenate([self._pool, np.empty(self._used, dtype=np.uint32)])
        self._pool[place : self._used] = ids
        return place


def _keys(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two numbers and a slot per word. The numbers of a word of up to 15 bytes are those of no other word."""
    padded = np.frombuffer(data + bytes(16), dtype=np.uint8)
    # the eight bytes from each position on, as one number
    numbers = np.ndarray(len(data) + 9, dtype="<u8", buffer=padded, strides=(1,))
    low = numbers.take(starts, mode="clip") & _MASKS.take(lengths, mode="clip")
    high = numbers.take(starts + 8, mode="clip") & _MASKS[:8].take(lengths - 8, mode="clip")
    high |= np.minimum(lengths, 255).astype(np.uint64) << np.uint64(56)
    mixed = (low ^ high * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0x94D049BB133111EB)
    return low, high, (mixed >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
