"""The one reader of documents: types, places, bounds, and nothing but regular files."""

import json
import math
import os
from pathlib import Path

import pytest

from spheret.support.documents import MOST_BYTES, Count, DamagedDocument, Document, Lines, Record
from spheret.support.files import NotRegular, open_regular, read_regular


class Part(Record):
    name: str
    sizes: list[Count]


class Whole(Record):
    part: Part
    rate: float | None
    format: str = "whole"
    version: int = 3


WHOLES = Document(Whole, "make", "make it again")
PARTS = Lines(Part, "make it again")
APPENDED = Lines(Part, "make it again", appended=True)
GOOD = Whole(part=Part(name="é", sizes=[1, 2]), rate=0.1)


def test_a_document_comes_back(tmp_path):
    path = tmp_path / "a.json"
    data = WHOLES.write(path, GOOD)
    assert path.read_bytes() == data == WHOLES.encode(GOOD)
    assert WHOLES.read(path) == GOOD
    assert WHOLES.format_of(path) == "whole"
    # strict JSON, sorted, for people too
    text = data.decode()
    assert list(json.loads(text, parse_constant=pytest.fail)) == ["format", "part", "rate", "version"]
    assert "é" in text
    assert text.endswith("}\n")
    WHOLES.write(path, Whole(part=GOOD.part, rate=math.nan))
    assert WHOLES.read(path).rate is None


def test_what_cannot_be_read_is_not_written(tmp_path):
    with pytest.raises(DamagedDocument, match=r"part\.sizes\[0\]: expected `int` >= 0"):
        WHOLES.write(tmp_path / "a.json", Whole(part=Part(name="a", sizes=[-1]), rate=None))
    assert not list(tmp_path.iterdir())


REST = '"rate": 1, "format": "whole", "version": 3}'
REFUSED = [
    ("", "input data was truncated"),
    ("{", "input data was truncated"),
    ('{"format": "other"}', r"was not written by spheret make: give another path, or make it again\.$"),
    ("[]", "was not written by spheret make"),
    ("3", "was not written by spheret make"),
    ('{"format": "whole"}', "has format version None, this spheret reads 3: make it again, or use the spheret that"),
    ('{"format": "whole", "version": 3.0}', "has format version 3.0"),
    ('{"format": "whole", "version": true}', "has format version True"),
    ('{"part": 1, ' + REST, r"part: expected `object`, got `int`\): make it again\.$"),
    ('{"part": {"name": "a"}, ' + REST, "part.sizes is missing"),
    ('{"part": {"name": "a", "sizes": [], "more": 1}, ' + REST, "part.more is an unknown key"),
    ('{"part": {"name": "a", "sizes": [1, "2"]}, ' + REST, r"part.sizes\[1\]: expected `int`, got `str`"),
    ('{"part": {"name": "a", "sizes": [' + "9" * 400 + "]}, " + REST, "expected `int` <= 9007199254740992"),
    ('{"part": {"name": "a", "sizes": [' + "9" * 5000 + "]}, " + REST, "part.sizes"),
    ('{"part": {"name": "a", "sizes": [' + "[" * 100_000 + "]}, " + REST, "nested too deeply|expected `int`"),
    ('{"more": ' + "[" * 100_000 + "]" * 100_000 + ", " + REST, "nested too deeply"),
    ('{"part": {"name": "a", "sizes": [NaN]}, ' + REST, "JSON is malformed"),
    ('{"rate": 1e400, "format": "whole", "version": 3}', "rate: number out of range"),
    ('{"part": {"name": "\udcff", "sizes": []}, ' + REST, "it is not UTF-8"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_one_sentence_with_file_and_place(text, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DamagedDocument, match=message) as caught:
        WHOLES.read(path)
    assert str(caught.value).startswith(f"{path} ")
    assert len(str(caught.value)) < 400 + len(str(path))
    assert "\n" not in str(caught.value)


def _pipe(path):
    os.mkfifo(path)


PLACES = {
    "a directory": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to(path.with_name("target")),
    "a pipe": _pipe,
}


@pytest.mark.parametrize("kind", PLACES)
def test_only_a_regular_file(kind, tmp_path):
    WHOLES.write(tmp_path / "target", GOOD)
    path = tmp_path / "a.json"
    PLACES[kind](path)
    with pytest.raises(DamagedDocument, match=rf"a\.json is {kind}"):
        WHOLES.read(path)
    assert WHOLES.format_of(path) is None


def test_links_are_followed_only_where_that_is_asked(tmp_path):
    (tmp_path / "target").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert read_regular(tmp_path / "link", 10, follow=True) == b"text"
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_APPEND):
        with pytest.raises(NotRegular, match="link"):
            open_regular(tmp_path / "link", flags)
    with pytest.raises(NotRegular, match="device"):
        open_regular(Path("/dev/zero"), follow=True)


def test_a_size_without_bound_is_not_read(tmp_path):
    path = tmp_path / "a.json"
    path.touch()
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(DamagedDocument, match=r"67,108,865 .*67,108,864"):
        WHOLES.read(path)


def test_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    first, second = Part(name="a", sizes=[]), Part(name="b", sizes=[2])
    lines = [PARTS.encode(each) for each in (first, second)]
    path.write_bytes(b"".join(lines))
    ends = [len(lines[0]), len(lines[0]) + len(lines[1])]
    assert list(PARTS.read(path)) == list(APPENDED.read(path)) == [(first, ends[0]), (second, ends[1])]
    assert list(PARTS.read(path, ends[0])) == [(second, ends[1])]
    # a line that a kill cut short, and one that damage did
    path.write_bytes(b"".join(lines)[:-3])
    assert list(APPENDED.read(path)) == [(first, ends[0])]
    assert [PARTS.decode(line, "") for line in PARTS.split(path)[:1]] == [first]
    with pytest.raises(DamagedDocument, match=r"line 2 of .*a\.jsonl"):
        list(PARTS.read(path))
    # also behind a whole record
    path.write_bytes(b"".join(lines)[:-1])
    with pytest.raises(DamagedDocument, match=r"line 2 of .*a\.jsonl"):
        list(PARTS.read(path))
    path.write_bytes(b"".join(lines)[:-3])
    path.write_bytes(lines[0] + b"\n" + lines[1])
    with pytest.raises(DamagedDocument, match="line 2 of"):
        list(APPENDED.read(path))
