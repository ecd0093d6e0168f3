"""Corpora: every format yields its documents from any cursor on, and bad files are refused with the reason."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_helpers import documents

from spheret.data import readers
from spheret.data.corpora import CORPORA, Hub, resolve

TEXTS = documents(30)


def _lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "n": n}) + "\n\n" for n, text in enumerate(texts)).encode()


def _parquet(path: Path) -> None:
    pq.write_table(pa.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=7)


# the ending of a file name: how to write TEXTS as such a file
WRITERS: dict[str, Callable[[Path], object]] = {
    ".jsonl": lambda path: path.write_bytes(_lines(TEXTS)),
    ".jsonl.gz": lambda path: path.write_bytes(gzip.compress(_lines(TEXTS[:9])) + gzip.compress(_lines(TEXTS[9:]))),
    ".jsonl.zst": lambda path: path.write_bytes(
        zstandard.compress(_lines(TEXTS[:9])) + zstandard.compress(_lines(TEXTS[9:]))
    ),
    ".parquet": _parquet,
}


def read(name: str | Path, cursor: object = None, **options: str) -> list[str]:
    reader = resolve(str(name), **options).read(cursor)
    return [text.decode() if isinstance(text, bytes) else text for text in reader]


def test_every_format_has_a_writer_here() -> None:
    assert set(readers.FORMATS) <= set(WRITERS)


@pytest.mark.parametrize("ending", WRITERS)
def test_formats(ending: str, tmp_path: Path) -> None:
    WRITERS[ending](tmp_path / f"corpus{ending}")
    assert read(tmp_path / f"corpus{ending}") == TEXTS


def _damage(body: bytes, kind: str) -> bytes:
    middle = len(body) // 2
    flipped = body[:middle] + bytes([body[middle] ^ 0xFF]) + body[middle + 1 :]
    return {
        "cut in half": body[:middle],
        "without its last byte": body[:-1],
        "flipped": flipped,
        "foreign": b"PK\x03\x04" + body,
        "with something behind it": body + b"something else",
    }[kind]


@pytest.mark.parametrize("ending", [".jsonl.gz", ".txt.gz", ".jsonl.zst", ".txt.zst", ".parquet"])
@pytest.mark.parametrize(
    "kind", ["cut in half", "without its last byte", "flipped", "foreign", "with something behind it"]
)
def test_a_compressed_file_that_is_not_whole_is_named(ending: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"corpus{ending}"
    body = _lines(documents(300))
    if ending == ".parquet":
        pq.write_table(pa.table({"text": documents(300)}), path)
    elif ending.endswith("gz"):
        path.write_bytes(gzip.compress(body))
    else:
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(body))
    path.write_bytes(_damage(path.read_bytes(), kind))
    with pytest.raises(ValueError, match=rf"corpus{re.escape(ending)} "):
        read(path)


def test_a_device_is_no_corpus(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("/dev/zero", "/dev/full", str(tmp_path / "fifo")):
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read(path)


@pytest.mark.parametrize("ending", [*WRITERS, ".txt"])
def test_a_reader_goes_on_from_any_cursor(ending: str, tmp_path: Path) -> None:
    write = WRITERS.get(ending, lambda path: path.write_text("\n\n".join(TEXTS) * 40))
    for name in "ab":
        write(tmp_path / f"{name}{ending}")
    corpus = resolve(str(tmp_path))
    everything = list(corpus.read(None))
    assert len(everything) > 5
    for stop in (0, 1, len(everything) // 2, len(everything) // 2 + 1, len(everything)):
        reader = corpus.read(None)
        before = list(itertools.islice(reader, stop))
        cursor = tuple(json.loads(json.dumps(reader.cursor())))
        assert before + list(corpus.read(cursor)) == everything
        assert 0 <= (reader.fraction() or 0) <= 1


def test_folders_and_globs_are_in_order_and_leave_out_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden.txt", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    assert read(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert read(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "sub/c.txt"]


def test_a_long_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    paragraph = "word " * 400 + "\n\n"
    (tmp_path / "long.txt").write_text(paragraph * 100)
    texts = read(tmp_path / "long.txt")
    assert "".join(texts) == paragraph * 100
    assert len(texts) > 5
    assert all(text.endswith("\n\n") and len(text) >= readers.DOCUMENT_BYTES for text in texts[:-1])


def test_a_text_without_blank_lines_is_cut_at_line_ends_and_a_line_never(tmp_path: Path) -> None:
    lines = ["line\n" * 30_000, "x" * 300_000 + "\n", "y" * 200_000]
    (tmp_path / "long.txt").write_text("".join(lines))
    texts = read(tmp_path / "long.txt")
    assert "".join(texts) == "".join(lines)
    assert all(text.endswith("\n") for text in texts[:-1])
    assert any("x" * 300_000 in text for text in texts)


def test_a_run_too_long_to_hold_is_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_BYTES", 100_000)
    (tmp_path / "run.txt").write_text("é€🙂" * 100_000)
    texts = read(tmp_path / "run.txt")
    assert all(len(text.encode()) <= 100_000 for text in texts)
    assert "".join(texts) == "é€🙂" * 100_000
    (tmp_path / "run.jsonl").write_bytes(json.dumps({"text": "x" * 500_000}).encode())
    with pytest.raises(ValueError, match=r"line 1 .*100,000"):
        read(tmp_path / "run.jsonl")


@pytest.mark.parametrize("name", [name for name, row in CORPORA.items() if not isinstance(row, Hub)])
def test_embedded_corpora(name: str) -> None:
    corpus = resolve(name)
    texts = list(corpus.read(None))
    assert len(texts) > 200
    assert 10_000_000 < sum(map(len, texts)) < 30_000_000
    assert corpus.licence
    assert corpus.revision
    assert corpus.size == sum(map(len, texts))


@pytest.mark.parametrize("row", [row for row in CORPORA.values() if isinstance(row, Hub)], ids=lambda row: row.name)
def test_hub_corpora_are_pinned_and_say_what_to_download(row: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    corpus = resolve(row.name)
    assert re.fullmatch("[0-9a-f]{40}", corpus.revision)
    assert corpus.licence
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError) as caught:
        corpus.read(None)
    for part in (row.path, row.revision, row.pattern, "--files"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "body, id"),
        ("a.jsonl", b'["x"]\n', "column"),
        ("a.jsonl", b'{"text": 5}\n', "column"),
        ("a.parquet", b"PAR1 not really", "a.parquet"),
        ("a.txt", b"text\0more", "NUL"),
        ("a.txt", "text".encode("utf-16"), "NUL"),
    ],
)
def test_bad_files(name: str, body: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_parquet_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a", None, "c"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", column="body") == ["a", "", "c"]
    with pytest.raises(ValueError, match="body, n"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="column"):
        read(tmp_path / "a.parquet", column="n")


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"text": "a", "n": ' + b"9" * 5000 + b"x}", b'{"text": "a"'])
def test_a_line_that_is_no_json_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "first"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 "):
        read(tmp_path / "a.jsonl")
