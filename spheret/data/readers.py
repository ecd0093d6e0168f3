"""Read documents from files: text, .jsonl and .parquet. Text and .jsonl may be compressed as .gz or .zst."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from spheret.data.records import Cursor
from spheret.support.errors import need

# a document as it stands in its file: bytes that should be UTF-8, or text that may hold lone surrogates
Document = bytes | str

# a text file of up to 4 times this size is one document; a longer one is cut into documents of at least this size
DOCUMENT_BYTES = 1 << 14
# text without a line end is held in memory up to this size, and a line of a .jsonl up to 4 times this size
LONGEST_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file. Yields the decompressed stream, and the raw one whose position tells how much has been read."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield io.BufferedReader(stream, _BLOCK_BYTES), raw
        elif path.suffix == ".zst":
            reader = need("zstandard", "data").ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            with io.BufferedReader(reader, _BLOCK_BYTES) as buffered:
                yield buffered, raw
        else:
            yield raw, raw


def _cut(buffer: bytearray, ended: bool) -> int:
    """Return where the first document of the buffer ends, or 0 if more of the file must be read to know."""
    longest = 4 * DOCUMENT_BYTES
    if len(buffer) <= longest:
        return len(buffer) if ended else 0
    blank_line = _BLANK_LINE.search(buffer, DOCUMENT_BYTES, longest)
    if blank_line:
        return blank_line.end()
    line_end = buffer.find(b"\n", longest) + 1
    if line_end:
        return line_end
    if len(buffer) > LONGEST_BYTES:
        # a byte 10xxxxxx continues a character, so never cut before one
        return next(
            (n for n in range(LONGEST_BYTES, LONGEST_BYTES - 4, -1) if buffer[n] & 0xC0 != 0x80), LONGEST_BYTES
        )
    return len(buffer) if ended else 0


def _text(path: Path, column: str, report: Callable[[float], None]) -> Iterator[Document]:
    """Yield the documents of a text file. A long file is cut at blank lines, or at line ends if there are none."""
    with _opened(path) as (stream, raw):
        buffer, ended = bytearray(), False
        while True:
            end = _cut(buffer, ended)
            if end:
                document = bytes(buffer[:end])
                del buffer[:end]
                if b"\0" in document:
                    raise ValueError(
                        f"{path} holds NUL bytes, so it is not UTF-8 text: leave it out, or convert it "
                        f"(iconv -f UTF-16 -t UTF-8, if that is what it is)."
                    )
                yield document
            elif ended:
                return
            else:
                block = stream.read(_BLOCK_BYTES)
                report(raw.tell())
                buffer += block
                ended = not block


def _jsonl(path: Path, column: str, report: Callable[[float], None]) -> Iterator[Document]:
    """Yield the text column of every line."""
    with _opened(path) as (stream, raw):
        number = 0
        while line := stream.readline(LONGEST_BYTES * 4):
            number += 1
            if len(line) == LONGEST_BYTES * 4:
                raise ValueError(f"{path}, line {number} is longer than {LONGEST_BYTES * 4:,} bytes: split it.")
            if line.isspace():
                continue
            report(raw.tell())
            # bytes that are not UTF-8 become lone surrogates here; chunks.repair replaces and counts them
            try:
                row = json.loads(line.decode("utf-8", "surrogateescape"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}): mend or remove it.") from None
            if not isinstance(row, dict) or column not in row:
                columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(missing_column(f"{path}, line {number}", column, columns))
            yield text_of(row[column], f"{path}, line {number}", column)


def _parquet(path: Path, column: str, report: Callable[[float], None]) -> Iterator[Document]:
    """Yield the text column of every row. 256 rows are in memory at a time."""
    parquet = need("pyarrow.parquet", "data")
    try:
        table = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}).") from None
    with table:
        names = table.schema_arrow.names
        if column not in names:
            raise ValueError(missing_column(str(path), column, ", ".join(names)))
        size, done = path.stat().st_size, 0
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield text_of(value, str(path), column)
            done += batch.num_rows
            report(size * done / table.metadata.num_rows)


def text_of(value: Any, where: str, column: str) -> Document:
    """Return the text of a row. A missing value is an empty text."""
    if value is None:
        return ""
    if not isinstance(value, str | bytes):
        raise ValueError(
            f"{where}: column {column!r} holds {type(value).__name__}, not text: name another column with --column."
        )
    return value


def missing_column(where: str, column: str, columns: str) -> str:
    """Return the message for a row that lacks the text column."""
    return f"{where} has no column {column!r}: it has {columns or 'none'}. Name the one with the text: --column NAME."


# the ending of a file's name, without .gz and .zst: the function that reads its documents. Other files are text.
# `report` is called with the bytes of the file that have been read so far
FORMATS: dict[str, Callable[[Path, str, Callable[[float], None]], Iterator[Document]]] = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}


def _format(path: Path) -> Callable[[Path, str, Callable[[float], None]], Iterator[Document]]:
    name = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    return FORMATS.get(name.suffix, _text)


class Reader(Protocol):
    """Documents in a fixed order.

    cursor: returns the place after the last document. A later reader starts there.
    fraction: returns how much has been read, 0 to 1, or None if that is unknown.
    """

    def __iter__(self) -> Iterator[Document]: ...
    def cursor(self) -> Cursor: ...
    def fraction(self) -> float | None: ...


class FileReader:
    """The documents of a list of files in order, starting at any cursor. With `whole`, each file is one document."""

    def __init__(self, files: Sequence[Path], column: str, cursor: Cursor | None = None, whole: bool = False) -> None:
        self._files, self._column, self._whole = files, column, whole
        place = (0, 0) if cursor is None else cursor
        if not isinstance(place, tuple) or place[0] >= max(1, len(files)):
            raise ValueError(
                f"the noted place {place} is none in these {len(files)} files: delete the directory and start again."
            )
        self._file, self._skip = place
        self._sizes = [path.stat().st_size for path in files]
        self._position = 0.0

    def __iter__(self) -> Iterator[Document]:
        for index in range(self._file, len(self._files)):
            skip = self._skip if index == self._file else 0
            self._file, self._skip, self._position = index, 0, 0.0
            for document in self._documents(self._files[index]):
                self._skip += 1
                if self._skip > skip:
                    yield document

    def _documents(self, path: Path) -> Iterator[Document]:
        if self._whole:
            yield path.read_bytes()
        else:
            yield from _format(path)(path, self._column, self._move)

    def _move(self, position: float) -> None:
        self._position = position

    def cursor(self) -> Cursor:
        """Return where the document after the last one begins: the file, and the documents to skip in it."""
        return self._file, self._skip

    def fraction(self) -> float | None:
        """Return how much of the files has been read, 0 to 1."""
        return (sum(self._sizes[: self._file]) + self._position) / max(1, sum(self._sizes))


def signature(files: Sequence[Path], root: Path) -> str:
    """Return a hash of the names, sizes and modification times of the files."""
    rows = [(path.relative_to(root).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
