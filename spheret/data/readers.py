"""From files on disk to documents: text, .jsonl and .parquet, the first two also as .gz or .zst."""

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

from spheret.support.errors import need

# a document as its file has it: bytes that should be utf-8, or text that may hold lone surrogates
Document = bytes | str

# a text file up to 4 x this is one document; a longer one is cut into documents of this size or a little more
DOCUMENT_BYTES = 1 << 14
# a run of text without a single line end, or one line of a .jsonl, may be this long and still be held in memory
LONGEST_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The decompressed stream of a file, and the raw one whose position says how far we are."""
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
    """Where the first document of the buffer ends, 0 if that needs more of the file."""
    longest = 4 * DOCUMENT_BYTES
    if len(buffer) <= longest:
        return len(buffer) if ended else 0
    blank = _BLANK_LINE.search(buffer, DOCUMENT_BYTES, longest)
    if blank:
        return blank.end()
    line = buffer.find(b"\n", longest) + 1
    if line:
        return line
    if len(buffer) > LONGEST_BYTES:
        # bytes 10xxxxxx continue a character: never cut before one
        return next(
            (n for n in range(LONGEST_BYTES, LONGEST_BYTES - 4, -1) if buffer[n] & 0xC0 != 0x80), LONGEST_BYTES
        )
    return len(buffer) if ended else 0


def _text(path: Path, column: str, told: Callable[[float], None]) -> Iterator[Document]:
    """The documents of a text file, cut at blank lines where it is long, else at line ends."""
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
                told(raw.tell())
                buffer += block
                ended = not block


def _jsonl(path: Path, column: str, told: Callable[[float], None]) -> Iterator[Document]:
    """The text column of every line."""
    with _opened(path) as (stream, raw):
        number = 0
        while line := stream.readline(LONGEST_BYTES * 4):
            number += 1
            if len(line) == LONGEST_BYTES * 4:
                raise ValueError(f"{path}, line {number} is longer than {LONGEST_BYTES * 4:,} bytes: split it.")
            if line.isspace():
                continue
            told(raw.tell())
            # bytes that are no utf-8 become lone surrogates here, and are replaced and counted later
            try:
                row = json.loads(line.decode("utf-8", "surrogateescape"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}): mend or remove it.") from None
            if not isinstance(row, dict) or column not in row:
                found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(missing_column(f"{path}, line {number}", column, found))
            yield text_of(row[column], f"{path}, line {number}", column)


def _parquet(path: Path, column: str, told: Callable[[float], None]) -> Iterator[Document]:
    """The text column of every row, one row group's slice at a time."""
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
            told(size * done / table.metadata.num_rows)


def text_of(value: Any, where: str, column: str) -> Document:
    """A row's text; a missing value is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str | bytes):
        raise ValueError(
            f"{where}: column {column!r} holds {type(value).__name__}, not text: name another with --column."
        )
    return value


def missing_column(where: str, column: str, found: str) -> str:
    """The sentence for rows without the column that should hold the text."""
    return f"{where} has no column {column!r}: it has {found or 'none'}. Name the one with the text: --column NAME."


# how a file's name ends, without .gz and .zst: how its documents are read; any other name is text
FORMATS: dict[str, Callable[[Path, str, Callable[[float], None]], Iterator[Document]]] = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}


def _format(path: Path) -> Callable[[Path, str, Callable[[float], None]], Iterator[Document]]:
    name = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    return FORMATS.get(name.suffix, _text)


class Reader(Protocol):
    """Documents in a fixed order, and the place reached, as plain JSON, to start again from."""

    def __iter__(self) -> Iterator[Document]: ...
    def cursor(self) -> Any: ...
    def fraction(self) -> float | None: ...


class FileReader:
    """The documents of a list of files in order, from any place a previous reader had reached."""

    def __init__(self, files: Sequence[Path], column: str, cursor: Any = None, whole: bool = False) -> None:
        self._files, self._column, self._whole = files, column, whole
        self._file: int
        self._skip: int
        self._file, self._skip = cursor or (0, 0)
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
            yield from _format(path)(path, self._column, self._told)

    def _told(self, position: float) -> None:
        self._position = position

    def cursor(self) -> Any:
        """Where the document after the last one begins: what a later reader starts from."""
        return [self._file, self._skip]

    def fraction(self) -> float | None:
        """How much of the files has been read, 0 to 1."""
        return (sum(self._sizes[: self._file]) + self._position) / max(1, sum(self._sizes))


def signature(files: Sequence[Path], root: Path) -> str:
    """A hash of the files' names, sizes and times: it changes when one of them does."""
    rows = [(path.relative_to(root).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
