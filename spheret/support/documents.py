"""JSON documents: each has one typed record, which is its only reader and its only writer.

A record is a `Record` with its keys as fields; adding a key is adding a field. A record of the core, which does not
import msgspec, is a dataclass with slots, by itself or inside of a `Record`. `Document` reads and writes files of
one record, `Lines` files with one record per line. Whatever is wrong with a file becomes one sentence that names the
file, the place inside it, what is expected there, and what to do.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from spheret.support import files
from spheret.support.errors import shortened

# no document of ours comes near these; a file beyond them is not one, and is not read
MOST_BYTES = 1 << 26
MOST_BYTES_OF_LINES = 1 << 31

# every integer has a bound, because msgspec reads integers of any length
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Positive = Annotated[int, Meta(ge=1, le=1 << 53)]
# JSON has no NaN and no infinity, so that every float is finite
# null stands for NaN and infinity
Number = float | None
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Meta(min_length=1)]


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of a JSON object with their types. Unknown keys are refused.

    `format` and `version` with defaults say what a file is; a file with others is refused by a sentence of its own.
    """


T = TypeVar("T")


class DamagedDocument(ValueError):
    """A file that is not what its record says."""


_MOST_INTEGER = 1 << 53


@cache
def _names(kind: Any) -> dict[str, str]:
    """The keys of a record in a file, with the names of its fields."""
    if is_dataclass(kind):
        return {each.name: each.name for each in fields(kind)}
    return {each.encode_name: each.name for each in msgspec.structs.fields(kind)}


def _check_strictly(plain: Any, decoded: Any, whole: bool, place: str = "$", bounded: bool = False) -> None:
    """Check what msgspec does not check in a dataclass: it ignores unknown keys, and does not bound integers.

    whole: whether every key must be there, also one with a default.
    """
    if isinstance(plain, dict) and isinstance(decoded, dict):
        for key, value in plain.items():
            _check_strictly(value, decoded[key], whole, f"{place}.{key}")
    elif isinstance(plain, dict):
        names, is_plain = _names(decoded.__class__), is_dataclass(decoded)
        missing = [key for key in names if whole and is_plain and key not in plain]
        if missing:
            raise msgspec.ValidationError(f"Object missing required field `{missing[0]}` - at `{place}`")
        for key, value in plain.items():
            if key not in names:
                raise msgspec.ValidationError(f"Object contains unknown field `{key}` - at `{place}`")
            _check_strictly(value, getattr(decoded, names[key]), whole, f"{place}.{key}", is_plain)
    elif isinstance(plain, list):
        for number, (value, each) in enumerate(zip(plain, decoded, strict=True)):
            _check_strictly(value, each, whole, f"{place}[{number}]", bounded)
    elif bounded and isinstance(plain, int) and not 0 <= plain <= _MOST_INTEGER:
        raise msgspec.ValidationError(f"Expected `int` from 0 to {_MOST_INTEGER} - at `{place}`")


class _Reader(Generic[T]):
    """Decodes one type strictly: nothing unknown in it at any depth and, if it is `whole`, nothing missing."""

    def __init__(self, kind: type[T], whole: bool) -> None:
        self._kind, self._whole = kind, whole

    def decode(self, data: bytes) -> T:
        plain = msgspec.json.decode(data)
        value = msgspec.convert(plain, self._kind, str_keys=True)
        _check_strictly(plain, value, self._whole)
        return value


class _Envelope(msgspec.Struct):
    format: Any = ""
    version: Any = None


class Document(Generic[T]):
    """JSON files of one record.

    command: the command that writes them. remedy: what to do about a damaged one, as the end of a sentence. most: the
    most bytes that one may have.
    """

    def __init__(self, record: type[T], command: str, remedy: str, most: int = MOST_BYTES) -> None:
        self.record, self.command, self.remedy, self.most = record, command, remedy, most
        self._decoder = _Reader(record, whole=True)
        kind: Any = record
        every = fields(kind) if is_dataclass(kind) else msgspec.structs.fields(kind)
        defaults = {each.name: each.default for each in every}
        self.format, self.version = defaults.get("format"), defaults.get("version")

    def read(self, path: Path) -> T:
        """Read a file. Raises FileNotFoundError if there is none and DamagedDocument if it is not as it should be."""
        return self.decode(self.read_bytes(path), path)

    def read_bytes(self, path: Path) -> bytes:
        """The bytes of a file, if it is one and is not too large."""
        return read_bytes(path, self.most, self.remedy)

    def format_of(self, path: Path) -> Any:
        """What a file says that it is, and nothing else of it: "" if it says nothing, None if it is damaged."""
        try:
            return msgspec.json.decode(self.read_bytes(path), type=_Envelope).format
        except msgspec.ValidationError:
            return ""
        except (*DECODE_ERRORS, DamagedDocument):
            return None

    def decode(self, data: bytes, path: Path) -> T:
        """The record in the bytes of a file."""
        try:
            if self.format is not None:
                self._check_format(data, path)
            return self._decoder.decode(data)
        except DECODE_ERRORS as error:
            raise DamagedDocument(f"{path} is damaged ({explain(error)}): {self.remedy}.") from None

    def _check_format(self, data: bytes, path: Path) -> None:
        try:
            envelope = msgspec.json.decode(data, type=_Envelope)
        except msgspec.ValidationError:
            # no object at all
            envelope = _Envelope()
        if envelope.format != self.format:
            raise DamagedDocument(
                f"{path} was not written by spheret {self.command}: give another path, or {self.remedy}."
            )
        if type(envelope.version) is not int or envelope.version != self.version:
            raise DamagedDocument(
                f"{path} has format version {shortened(repr(envelope.version))}, this spheret reads {self.version}: "
                f"{self.remedy}, or use the spheret that wrote it."
            )

    def encode(self, record: T) -> bytes:
        """The bytes of a file. Equal records give equal bytes. NaN and infinity become null."""
        return files.dump(record)

    def write(self, path: Path, record: T) -> bytes:
        """Write a file in one step, and return its bytes. What could not be read again is never written.

        Raises if there is a file without this format.
        """
        data = self.encode(record)
        self.decode(data, path)
        if self.format is not None and os.path.lexists(path) and self.format_of(path) != self.format:
            raise files.foreign(path)
        files.write_atomically(path, data)
        return data


class Lines(Generic[T]):
    """Files with one record per line.

    remedy: as in Document. appended: whether lines are written one by one, so that a kill may cut the last one short.
    """

    def __init__(self, record: type[T], remedy: str, appended: bool = False) -> None:
        self.record, self.remedy, self.appended = record, remedy, appended
        self._decoder, self._encoder = _Reader(record, whole=False), msgspec.json.Encoder()

    def read(self, path: Path) -> Iterator[tuple[T, int]]:
        """Every record, with the byte at which its line ends.

        If lines are appended, a last one without its end is left out. Any other line must hold a record.
        """
        end = 0
        *lines, rest = read_bytes(path, MOST_BYTES_OF_LINES, self.remedy).split(b"\n")
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            yield self.decode(line, f"line {number} of {path}"), end
        if rest and not self.appended:
            raise DamagedDocument(f"line {len(lines) + 1} of {path} is damaged (it has no end): {self.remedy}.")

    def split(self, path: Path) -> list[bytes]:
        """The lines of a file without their ends. If lines are appended, a last one without its end is left out."""
        *lines, rest = read_bytes(path, MOST_BYTES_OF_LINES, self.remedy).split(b"\n")
        return [*lines, rest] if rest and not self.appended else lines

    def decode(self, line: bytes, where: str) -> T:
        try:
            return self._decoder.decode(line)
        except DECODE_ERRORS as error:
            raise DamagedDocument(f"{where} is damaged ({explain(error)}): {self.remedy}.") from None

    def encode(self, record: T) -> bytes:
        """A line with its end. NaN and infinity become null."""
        return self._encoder.encode(record) + b"\n"


def read_bytes(path: Path, most: int, remedy: str, follow: bool = False) -> bytes:
    """The bytes of a regular file. Anything else in its place is a sentence that ends with `remedy`.

    follow: whether the file may be reached by a link.
    """
    try:
        return files.read_regular(path, most, follow)
    except FileNotFoundError:
        raise
    except files.NotRegular as error:
        raise DamagedDocument(f"{error}: {remedy}.") from None
    except OSError as error:
        raise DamagedDocument(f"{path} cannot be read ({error.strerror}): {remedy}.") from None


def read_toml(data: bytes) -> dict[str, Any]:
    """The tables of a TOML file of the user's. Whatever is wrong with it is a ValueError or one of DECODE_ERRORS."""
    tables = tomllib.loads(data.decode())
    values: list[Any] = [tables]
    while values:
        value = values.pop()
        if isinstance(value, (dict, list)):
            values += value.values() if isinstance(value, dict) else value
        # Python reads hexadecimal digits without end, and then cannot print the number
        elif isinstance(value, int) and value.bit_length() > 64:
            raise ValueError(f"an integer has {value.bit_length():,} bits, and may have 64")
    return tables


# whatever bytes can do to msgspec
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_AT = re.compile(r"(?P<what>.*) - at `\$\.?(?P<place>.*)`", re.DOTALL)
_KEY = re.compile(r"Object (?P<kind>missing required|contains unknown) field `(?P<key>.*)`", re.DOTALL)


def explain(error: Exception) -> str:
    """What is wrong, beginning with the place: "train.steps: expected `int`, got `str`"."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 at byte {error.start:,}"
    match = _AT.fullmatch(str(error))
    what, place = (match["what"], match["place"]) if match else (str(error), "")
    if key := _KEY.fullmatch(what):
        full = f"{place}.{key['key']}" if place else key["key"]
        return f"{shortened(full)} is {'missing' if key['kind'].startswith('missing') else 'an unknown key'}"
    what = shortened(what if what[:5] == "JSON " else what[:1].lower() + what[1:], 200)
    return f"{shortened(place)}: {what}" if place else what
