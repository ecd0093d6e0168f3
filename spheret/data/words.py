"""Byte-level BPE at memory speed: text is cut into words by arithmetic on arrays, and known words are looked up.

GPT-2's vocabulary works on the words of one regular expression,

    's | 't | 're | 've | 'm | 'll | 'd | ?letters | ?digits | ?others | spaces not before a word | space

and a text has few distinct words, so nearly all of the work is to find where words begin and which ids they have.
Both are done here for some thousand words at once; a word that is not known yet goes to the tokenizer itself, and so
does any stretch with characters outside ASCII, whose classes are the tokenizer's business. The ids are the same.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

# it ends a document here: a byte that no UTF-8 text has
SEPARATOR = b"\xff"
_LETTER, _DIGIT, _OTHER, _SPACE, _END, _FOREIGN = range(6)
_CLASSES = np.full(256, _OTHER, dtype=np.uint8)
_CLASSES[[*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)]] = _LETTER
_CLASSES[[*range(ord("0"), ord("9") + 1)]] = _DIGIT
_CLASSES[[9, 10, 11, 12, 13, 32]] = _SPACE
_CLASSES[128:] = _FOREIGN
_CLASSES[SEPARATOR[0]] = _END
_TRANSLATION = _CLASSES.tobytes()

# bytes that fit the processor's caches with all that is computed from them
_WINDOW_BYTES = 1 << 16
# between two words, where no word of the expression can reach across
_CUT = re.compile(rb"(?=\xff)|[!-~](?=[ \n][!-~])")
# a word up to this long is looked up by its bytes, as two 64-bit numbers with the length on top
_KEY_BYTES = 15
_TABLE_BITS = 18
# a window has fewer ids than this counts to
_COUNT_BITS = 24
_LONGEST_KEPT = 64
_LINE = re.compile(rb" ?[!-~]+")
_KEPT_WORDS = 1 << 18
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)


# a longer document is encoded in pieces of about this many characters, so that memory stays bounded
PIECE_CHARACTERS = 1 << 18
# between two words, before the space: a word never reaches across, so the ids are the same
_BETWEEN = re.compile(r"(?<=\S)(?=[ \n]\S)")


def pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """The text in pieces of `size` characters up to the next word end, or twice that where no word ends."""
    start = 0
    while len(text) - start > 2 * size:
        between = _BETWEEN.search(text, start + size, start + 2 * size)
        end = between.start() if between else start + 2 * size
        yield text[start:end]
        start = end
    yield text[start:]


def _windows(data: bytes) -> Iterator[tuple[int, int]]:
    """The ends of stretches of about _WINDOW_BYTES, cut where no word is; longer where there is no such place."""
    start = 0
    while start < len(data):
        cut = _CUT.search(data, start + _WINDOW_BYTES)
        end = cut.end() if cut else len(data)
        yield start, end
        start = end


def word_starts(text: bytes) -> np.ndarray:
    """Where words begin; a stretch between two cuts with bytes outside ASCII is one word: (words,) int64."""
    data = np.frombuffer(text, dtype=np.uint8)
    classes = np.frombuffer(text.translate(_TRANSLATION), dtype=np.uint8)
    begins = np.empty(len(data), dtype=bool)
    begins[0] = True
    np.not_equal(classes[1:], classes[:-1], out=begins[1:])
    wordlike = classes[1:] < _SPACE
    # the last of some spaces stands alone or begins the next word, and only the blank itself does the latter
    begins[:-1] |= (classes[:-1] == _SPACE) & wordlike
    begins[1:] &= ~((data[:-1] == 32) & wordlike)
    _contractions(data, classes, begins)
    if classes.max() == _FOREIGN:
        _merge_foreign(data, classes, begins)
    return np.flatnonzero(begins)


def _contractions(data: np.ndarray, classes: np.ndarray, begins: np.ndarray) -> None:
    """'s 't 'm 'd 're 've 'll are words wherever a word begins with the apostrophe, and end before what follows."""
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
    printable = (data > 32) & (data < 127)
    cut = np.zeros(len(data), dtype=bool)
    cut[1:-1] = ((data[1:-1] == 32) | (data[1:-1] == 10)) & printable[:-2] & printable[2:]
    # a document's end is a word of its own
    cut |= classes == _END
    cut[1:] |= classes[:-1] == _END
    cut[0] = True
    stretch = np.cumsum(cut) - 1
    touched = np.zeros(int(stretch[-1]) + 1, dtype=bool)
    touched[stretch[classes == _FOREIGN]] = True
    begins &= cut | ~touched[stretch]


class WordEncoder:
    """Documents to ids, each with the end of text after it, exactly as `encode` gives them one by one."""

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: Mapping[bytes, int], end_of_text: int) -> None:
        self._encode, self._end_of_text = encode, end_of_text
        self._vocabulary = {**vocabulary, SEPARATOR: end_of_text}
        # every thread its own: a table that another one is writing to cannot be read
        self._local = threading.local()

    def __call__(self, documents: Sequence[bytes]) -> np.ndarray:
        """The ids of all documents in order: (ids,) uint32."""
        if not documents:
            return np.zeros(0, dtype=np.uint32)
        data = SEPARATOR.join([*documents, b""])
        table = getattr(self._local, "table", None)
        if table is None or table.full():
            table = self._local.table = _Table(self._encode, self._vocabulary)
        found: list[np.ndarray] = []
        for start, end in _windows(data):
            # long without a place to cut: nothing for the arrays, which would take ten times its size
            if end - start > 8 * _WINDOW_BYTES:
                found += self._plainly(data[start:end])
            else:
                found.append(table.ids(data[start:end]))
        return np.concatenate(found)

    def _plainly(self, data: bytes) -> Iterator[np.ndarray]:
        for number, text in enumerate(data.split(SEPARATOR)):
            if number:
                yield np.array([self._end_of_text], dtype=np.uint32)
            for part in pieces(text.decode()):
                yield np.array(self._encode(part), dtype=np.uint32)


class _Table:
    """The ids of words by their bytes: in arrays with two slots a word, and where those are taken in a dictionary."""

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: Mapping[bytes, int]) -> None:
        self._encode, self._vocabulary = encode, vocabulary
        size = 1 << _TABLE_BITS
        self._low, self._high = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=np.uint64)
        # place and count in one number: a word's ids are pool[place:place + count]; an id stands at its own place
        self._where = np.zeros(size, dtype=np.int64)
        self._pool = np.arange(max(vocabulary.values()) + 1, dtype=np.uint32)
        self._used = len(self._pool)
        self._room = self._used + 8 * _KEPT_WORDS
        self._known: dict[bytes, int] = {}
        (self._line_end,) = encode("\n")
        words = [word for word in vocabulary if len(word) <= _KEY_BYTES]
        lengths = np.array([len(word) for word in words])
        low, high, slots = _keys(b"".join(words), np.cumsum(lengths) - lengths, lengths)
        self._low[slots], self._high[slots] = low, high
        self._where[slots] = np.array([vocabulary[word] for word in words]) << _COUNT_BITS | 1

    def full(self) -> bool:
        """Whether it has learnt more than it should keep in memory."""
        return len(self._known) > _KEPT_WORDS or self._used > self._room

    def ids(self, data: bytes) -> np.ndarray:
        """The ids of a window: (ids,) uint32."""
        starts = word_starts(data)
        lengths = np.diff(starts, append=len(data))
        low, high, slots = _keys(data, starts, lengths)
        # slots are in range, so clipping changes none; it is faster than checking
        where = self._where.take(slots, mode="clip")
        missed = np.flatnonzero(
            (self._low.take(slots, mode="clip") != low) | (self._high.take(slots, mode="clip") != high)
        )
        if missed.size:
            # the second place that a word may have
            low, high, slots = low[missed], high[missed], slots[missed] ^ (1 << _TABLE_BITS - 1)
            where[missed] = self._where[slots]
            unknown = (self._low[slots] != low) | (self._high[slots] != high)
            missed, low, high, slots = missed[unknown], low[unknown], high[unknown], slots[unknown]
        if missed.size:
            where[missed] = self._learn(data, starts[missed], lengths[missed])
            short = lengths[missed] <= _KEY_BYTES
            low, high, slots, fresh = low[short], high[short], slots[short], where[missed][short]
            # a word takes its first place while that is free, else its second, whoever is there
            first = slots ^ (1 << _TABLE_BITS - 1)
            slots = np.where(self._where[first] == 0, first, slots)
            self._low[slots], self._high[slots], self._where[slots] = low, high, fresh
        places, counts = where >> _COUNT_BITS, where & (1 << _COUNT_BITS) - 1
        ends = np.cumsum(counts)
        return self._pool[np.arange(ends[-1]) + np.repeat(places - ends + counts, counts)]

    def _learn(self, data: bytes, starts: np.ndarray, lengths: np.ndarray) -> list[int]:
        """Where the ids of words are that the arrays do not hold."""
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
        # words without a line end inside can be asked for together, a line each: the expression joins none of them
        fresh = np.array(self._encode(b"\n".join([*lines, b""]).decode()) if lines else [], dtype=np.uint32)
        ends = np.flatnonzero(fresh == self._line_end)
        begins = np.concatenate([ends[:0], [0], ends[:-1] + 1]) if lines else ends
        places = (self._keep(fresh) + begins) << _COUNT_BITS | ends - begins
        known.update(zip(lines, places.tolist(), strict=True))
        for word in others:
            ids = np.array(self._encode(word.decode()), dtype=np.uint32)
            known[word] = self._keep(ids) << _COUNT_BITS | len(ids)
        found = [known[word] for word in words]
        for word in others:
            if len(word) > _LONGEST_KEPT:
                del known[word]
        return found

    def _keep(self, ids: np.ndarray) -> int:
        """Add ids to the pool; where they are."""
        place, self._used = self._used, self._used + len(ids)
        if self._used > len(self._pool):
            self._pool = np.concatenate([self._pool, np.empty(self._used, dtype=np.uint32)])
        self._pool[place : self._used] = ids
        return place


def _keys(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words as two numbers each, one to one up to 15 bytes and unlike those beyond, and the slot they fall on."""
    padded = np.frombuffer(data + bytes(16), dtype=np.uint8)
    # eight bytes from any position on, as one number
    numbers = np.ndarray(len(data) + 9, dtype="<u8", buffer=padded, strides=(1,))
    low = numbers.take(starts, mode="clip") & _MASKS.take(lengths, mode="clip")
    high = numbers.take(starts + 8, mode="clip") & _MASKS[:8].take(lengths - 8, mode="clip")
    high |= np.minimum(lengths, 255).astype(np.uint64) << np.uint64(56)
    mixed = (low ^ high * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0x94D049BB133111EB)
    return low, high, (mixed >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
