"""Documents as valid UTF-8, collected into chunks that are large enough to send to a worker process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spheret.data.readers import Document, Reader

CHUNK_BYTES = 1 << 17
_SURROGATES = re.compile("[\ud800-\udfff]")


def repair(document: Document) -> tuple[bytes, int]:
    """Return a document as valid UTF-8, and the number of characters that U+FFFD replaced."""
    if isinstance(document, str):
        text, replaced = _SURROGATES.subn("\ufffd", document) if not document.isascii() else (document, 0)
        return text.encode(), replaced
    try:
        document.decode()
    except UnicodeDecodeError:
        text = document.decode("utf-8", "replace")
        return text.encode(), text.count("\ufffd") - document.count("\ufffd".encode())
    return document, 0


@dataclass
class Chunk:
    """Documents of about CHUNK_BYTES together.

    counts: empty documents, repaired documents and replaced characters.
    cursor: where the next chunk begins, for `Corpus.read`.
    fraction: how much of the corpus has been read, 0 to 1, or None if that is unknown.
    """

    documents: list[bytes] = field(default_factory=list)
    size: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    cursor: Any = None
    fraction: float | None = None

    def add(self, document: Document) -> None:
        """Add a document as valid UTF-8. An empty document is only counted."""
        text, replaced = repair(document)
        # an empty document has a size too, so that a chunk of nothing but empty documents also ends
        self.size += len(text) + 1
        if text:
            self.documents.append(text)
        self.counts["empty"] += not text
        self.counts["repaired"] += replaced > 0
        self.counts["replaced_characters"] += replaced


def chunks(reader: Reader) -> Iterator[Chunk]:
    """Yield all documents of a reader in order, in chunks."""
    chunk = Chunk()
    for document in reader:
        chunk.add(document)
        if chunk.size >= CHUNK_BYTES:
            chunk.cursor, chunk.fraction = reader.cursor(), reader.fraction()
            yield chunk
            chunk = Chunk()
    chunk.cursor, chunk.fraction = reader.cursor(), 1.0
    yield chunk
