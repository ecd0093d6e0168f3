"""Documents as valid UTF-8, collected into chunks, and the ids of these chunks, which threads encode in order.

The libraries of the tokenizers encode without holding Python's lock, so threads use every core.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spheret.data.readers import Document, Reader
from spheret.data.shards import SPLITS, dtype_for
from spheret.data.split import Split
from spheret.data.tokenizers import Tokenizer

CHUNK_BYTES = 1 << 17
# the documents that are read and not yet written, in bytes
FLIGHT_BYTES = 1 << 26
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


@dataclass
class Encoded:
    """The ids and the number of documents of a chunk, per split."""

    ids: dict[str, np.ndarray]
    documents: dict[str, int]
    # the sum of the documents' SHA-256, which does not depend on their order
    digest: int


def encode(documents: Sequence[bytes], tokenizer: Tokenizer, split: Split) -> Encoded:
    """Return the ids of documents, or of their parts, in order in each split. The end of text follows each."""
    texts: dict[str, list[bytes]] = {name: [] for name in SPLITS}
    total = 0
    for document in documents:
        digest = hashlib.sha256(document).digest()
        for name, part in split.parts(document, digest):
            texts[name].append(part)
        total += int.from_bytes(digest, "big")
    dtype = dtype_for(tokenizer.vocab_size)
    return Encoded(
        {name: tokenizer.encode_documents(part).astype(dtype) for name, part in texts.items()},
        {name: len(part) for name, part in texts.items()},
        total,
    )


def encode_chunks(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, split: Split, threads: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield every chunk with its ids, in order. At most FLIGHT_BYTES are under way."""
    pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="spheret-prepare")
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(encode, chunk.documents, tokenizer, split)))
            held += chunk.size
            while len(pending) > 4 * threads or (held > FLIGHT_BYTES and len(pending) > 1):
                first, future = pending.popleft()
                yield first, future.result()
                held -= first.size
        for first, future in pending:
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
