"""The one reader of documents: types, places, bounds, and nothing but regular files."""

import json
import math
import os
from pathlib import Path

import pytest

from spheret.support.documents import Count, DamagedDocument, Document, Lines, Record
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
    with pytest.raises(DamagedDocument, match=r"part\.sizes\[0\]"):
        WHOLES.write(tmp_path / "a.json", Whole(part=Part(name="a", sizes=[-1]), rate=None))
    assert not list(tmp_path.iterdir())


def test_links_are_followed_only_where_that_is_asked(tmp_path):
    (tmp_path / "target").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert read_regular(tmp_path / "link", 10, follow=True) == b"text"
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_APPEND):
        with pytest.raises(NotRegular, match="link"):
            open_regular(tmp_path / "link", flags)
    with pytest.raises(NotRegular, match="device"):
        open_regular(Path("/dev/zero"), follow=True)


def test_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    first, second = Part(name="a", sizes=[]), Part(name="b", sizes=[2])
    lines = [PARTS.encode(each) for each in (first, second)]
    path.write_bytes(b"".join(lines))
    ends = [len(lines[0]), len(lines[0]) + len(lines[1])]
    assert list(PARTS.read(path)) == list(APPENDED.read(path)) == [(first, ends[0]), (second, ends[1])]
    # a line that a kill cut short, and one that damage did
    path.write_bytes(b"".join(lines)[:-3])
    assert list(APPENDED.read(path)) == [(first, ends[0])]
    assert [PARTS.decode(line, "") for line in PARTS.split(path)[:1]] == [first]
    with pytest.raises(DamagedDocument, match=r"line 2 of .*a\.jsonl"):
        list(PARTS.read(path))
    path.write_bytes(lines[0] + b"\n" + lines[1])
    with pytest.raises(DamagedDocument, match="line 2 of"):
        list(APPENDED.read(path))
