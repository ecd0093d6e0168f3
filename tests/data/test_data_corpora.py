"""Corpora: every format yields its documents from any cursor on, and bad files are refused with the reason."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_helpers import documents

from spheret.data import corpora, prepare, readers
from spheret.data.corpora import CORPORA, Hub, resolve
from spheret.support.errors import explanation

ROOT = Path(__file__).parents[2]
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


def _folder(path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden.txt", ".git/config"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    return path


def test_folders_and_globs_are_in_order_and_name_what_they_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path / "texts")
    everything = ["a.txt", "b.txt", "sub/c.txt"]
    assert read(folder) == everything
    assert read(f"{folder}/*.txt") == everything[:2]
    for pattern in ("**/*.txt", "**", "**/*"):
        assert read(f"{folder}/{pattern}") == everything
    prepare(str(folder), None, tmp_path / "out", val_fraction=0, quiet=False)
    assert ".git, .hidden.txt" in capsys.readouterr().err
    # a link to a folder is followed, and no folder is read twice
    (folder / "linked").symlink_to(folder / "sub")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "d.txt").write_text("d.txt")
    (folder / "other").symlink_to(tmp_path / "elsewhere")
    for name in (folder, f"{folder}/**"):
        assert sorted(read(name)) == ["a.txt", "b.txt", "d.txt", "sub/c.txt"]


@pytest.mark.parametrize(
    ("entry", "make"),
    [
        ("pipe", os.mkfifo),
        ("device", lambda path: path.symlink_to("/dev/null")),
        ("dangling", lambda path: path.symlink_to("missing")),
        ("itself", lambda path: path.symlink_to(path)),
        ("loop", lambda path: path.symlink_to(path.parent.parent)),
        ("closed", Path.mkdir),
    ],
)
def test_no_entry_of_a_folder_is_dropped(
    entry: str, make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path / "texts")
    make(folder / "sub" / entry)
    entries = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        # root may read every folder
        if path.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return entries(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    for name in (folder, f"{folder}/**", f"{folder}/**/*"):
        with pytest.raises((ValueError, OSError), match=f"sub/{entry}"):
            read(name)
    if entry not in ("loop", "closed"):
        with pytest.raises((ValueError, OSError), match=f"sub/{entry}"):
            read(f"{folder}/sub/*")


def test_a_folder_that_a_plain_glob_matches_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="texts/sub"):
        read(f"{_folder(tmp_path / 'texts')}/*")


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


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_is_documented(name: str) -> None:
    page, row = (ROOT / "docs" / "data.md").read_text(), CORPORA[name]
    assert f"| `{name}` |" in page
    facts = (row.path, row.revision, row.licence, f"{row.documents:,}") if isinstance(row, Hub) else ()
    assert [fact for fact in facts if fact not in page] == []


@pytest.mark.parametrize("name", ["sotu", "stdlib"])
def test_embedded_corpora(name: str) -> None:
    corpus = resolve(name)
    texts = list(corpus.read(None))
    assert len(texts) > 200
    assert 10_000_000 < sum(map(len, texts)) < 30_000_000
    assert corpus.licence
    assert corpus.revision
    assert corpus.size == sum(map(len, texts))


def test_rfcs_are_read_where_debian_has_installed_them(tmp_path: Path) -> None:
    for package in corpora.RFC_PACKAGES:
        (tmp_path / package).mkdir()
    for name in ("standard", "informational", "links"):
        (tmp_path / "RFC" / name).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="apt install doc-rfc-experimental"):
        corpora.rfc(None, "text", tmp_path)
    texts = {"standard/rfc10": "ten", "standard/rfc9": "nine", "informational/rfc10": "ten", "standard/rfc11": "nine"}
    for place, text in texts.items():
        (tmp_path / "RFC" / f"{place}.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        for twin in ("html", "json", "txt.html"):
            (tmp_path / "RFC" / f"{place}.{twin}").write_text(twin)
    (tmp_path / "RFC" / "standard" / "rfc0002.txt").write_text("two")
    (tmp_path / "RFC" / "rfc-index.txt").write_text("index")
    (tmp_path / "RFC" / "links" / "rfc7.txt").symlink_to(tmp_path / "RFC" / "standard" / "rfc0002.txt")
    corpus = corpora.rfc(None, "text", tmp_path)
    assert list(corpus.read(None)) == [b"two", b"nine", b"ten"]
    assert "4 RFCs up to 11" in corpus.revision
    (tmp_path / "doc-rfc-misc").rmdir()
    with pytest.raises(FileNotFoundError, match=r"apt install doc-rfc-misc$"):
        corpora.rfc(None, "text", tmp_path)


def test_python_is_the_sources_of_pinned_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert all(pins.get(name, version) == version for name, (version, _) in corpora.WHEELS.items())
    monkeypatch.setattr(corpora, "WHEELS", {name: corpora.WHEELS[name] for name in ("numpy", "matplotlib")})
    corpus = resolve("python")
    texts = list(corpus.read(None))
    assert 10_000_000 < corpus.size == sum(map(len, texts))
    assert len(texts) == len(set(texts)) > 500
    assert (Path(np.__file__).parent / "matlib.py").read_bytes() in texts
    assert list(resolve("python").read((300, 0))) == texts[300:]
    monkeypatch.setattr(corpora, "WHEELS", {"numpy": ("0.1", ""), "no-such-wheel": ("2", "")})
    with pytest.raises(ImportError, match=r"pip install numpy==0\.1 no-such-wheel==2$"):
        resolve("python")


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
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "line 2 "),
        ("a.jsonl", b'{"text": "a"}\n{"text": "a", "n": ' + b"9" * 5000 + b"x}", "line 2 "),
        ("a.jsonl", b'{"text": "a"}\n{"text": "a"', "line 2 "),
        ("a.parquet", b"PAR1 not really", "a.parquet"),
        ("a.txt", b"text\0more", "NUL"),
        ("a.txt", "text".encode("utf-16"), "NUL"),
    ],
)
def test_bad_files(name: str, body: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


ODD_COLUMNS = {
    "numbers": pa.array([1]),
    "lists": pa.array([["a"]]),
    "records": pa.array([{"a": "x"}]),
    "moments": pa.array([2**62], pa.timestamp("us")),
    "days": pa.array([2**30], pa.date32()),
    "places": pa.array([1], pa.timestamp("us", tz="Nowhere/No")),
    "bytes": pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")),
}


def test_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a", None, "c"], "n": [1, 2, 3]}), path)
    assert read(path, column="body") == ["a", "", "c"]
    with pytest.raises(ValueError, match="body, n"):
        read(path)
    # a column must be one
    pq.write_table(pa.table([pa.array(["one"]), pa.array(["two"])], names=["text", "text"]), path)
    with pytest.raises(ValueError, match="text, text"):
        read(path)


@pytest.mark.parametrize("kind", ODD_COLUMNS)
def test_a_parquet_column_of_an_odd_type_is_refused(kind: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ODD_COLUMNS[kind]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet") as caught:
        read(tmp_path / "a.parquet")
    assert explanation(caught.value) is not None


@pytest.mark.parametrize("column", ['a"b', "a\\b", "a\nb", "a.b", "", "ü"])
def test_a_column_may_have_any_name(column: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"other": "x", column: "text"}) + "\n")
    pq.write_table(
        pa.table([pa.array([{"b": "nested"}]), pa.array(["text"])], names=["a", column]), tmp_path / "b.parquet"
    )
    assert read(tmp_path, column=column) == ["text", "text"]
