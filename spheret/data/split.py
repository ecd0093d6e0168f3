"""Which text is for training and which for validation: whole documents, or the end of each if there are too few."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# with fewer validation documents than this to be expected, chance would decide how much text they hold
FEWEST_DOCUMENTS = 4
# where a document may be cut, the best first: after a blank line, a line, a word
_ENDS = (re.compile(rb"\n[ \t\r]*\n"), re.compile(rb"\n"), re.compile(rb"[ \t]+"))


@dataclass(frozen=True)
class Split:
    """How documents are divided into the two splits.

    by_position: the end of every document is for validation. Otherwise its hash decides about all of it.
    """

    val_fraction: float
    by_position: bool = False

    def parts(self, document: bytes, digest: bytes | None = None) -> Iterator[tuple[str, bytes]]:
        """Yield each part of a document, none of them empty, with the name of its split.

        digest: the SHA-256 of the document, if it is known.
        """
        if not self.by_position:
            digest = hashlib.sha256(document).digest() if digest is None else digest
            validates = int.from_bytes(digest[:8], "big") < int(self.val_fraction * 2**64)
            yield "val" if validates else "train", document
            return
        cut = position(document, self.val_fraction)
        if cut:
            yield "train", document[:cut]
        if cut < len(document):
            yield "val", document[cut:]


def choose(documents: Iterable[bytes], val_fraction: float) -> Split:
    """Return how to divide the documents of a user's own files, none of them empty. Reads no more than it needs."""
    whole = Split(val_fraction)
    if not val_fraction:
        return whole
    found: set[str] = set()
    for count, document in enumerate(documents, start=1):
        found.update(name for name, _ in whole.parts(document))
        if len(found) == 2 and count * val_fraction >= FEWEST_DOCUMENTS:
            return whole
    return Split(val_fraction, by_position=True)


def position(document: bytes, val_fraction: float) -> int:
    """Return where the validation part of a document begins, which is its last `val_fraction`.

    The cut is the nearest blank line that changes the size of the part by at most a half. If there is none, it is the
    nearest end of a line, then of a word, then of a character. A document with nothing to cut is for training.
    """
    tail = round(val_fraction * len(document))
    wanted, room = len(document) - tail, tail // 2
    first, last = max(1, wanted - room), min(len(document) - 1, wanted + room)
    for end in _ENDS:
        # an end of up to a few bytes may begin before the first place
        places = [match.end() for match in end.finditer(document, max(0, first - 8), last)]
        near = [place for place in places if first <= place <= last]
        if near:
            return min(near, key=lambda place: (abs(place - wanted), place))
    # a byte 10xxxxxx continues a character, so never cut before one
    while 0 < wanted < len(document) and document[wanted] & 0xC0 == 0x80:
        wanted -= 1
    return wanted or len(document)
