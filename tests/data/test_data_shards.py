"""The format: a damaged file is named before it is used."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spheret.data import open_data, prepare, verify
from spheret.data.manifest import MIB
from spheret.data.shards import dtype_for


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared directory."""
    root = tmp_path_factory.mktemp("shards")
    (root / "texts").mkdir()
    for number in range(60):
        (root / "texts" / f"{number}.txt").write_text(f"text {number} " * 20)
    return prepare(str(root / "texts"), "bytes", root / "out", val_fraction=0.2, shard_tokens=4000).path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _resize(path: Path, by: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:by] if by < 0 else data + b"\0" * by)


# how a directory is damaged, and what is named when it is opened
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: _resize(path / "train-00000.bin", -2), "train-00000.bin has 7,998 bytes"),
    "too long": (lambda path: _resize(path / "val-00000.bin", 4), "val-00000.bin has"),
    "missing shard": (lambda path: (path / "train-00000.bin").unlink(), "train-00000.bin"),
    "missing counts": (lambda path: (path / "counts.bin").unlink(), "counts.bin"),
    "wrong sum": (lambda path: _edit(path, lambda m: m["tokens"].update(val=1)), "tokens"),
    "wrong type": (lambda path: _edit(path, lambda m: m.update(dtype="uint32")), "dtype"),
    "large id": (lambda path: _edit(path, lambda m: m["shards"]["train"][0].update(largest_id=257)), "257"),
    "another place": (lambda path: _edit(path, lambda m: m["shards"]["train"][0].update(name="../../x.bin")), "name"),
    "another order": (lambda path: _edit(path, lambda m: m["shards"]["train"].reverse()), "shards of train"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_cannot_be_opened(damage: str, copy: Path) -> None:
    act, message = REFUSED[damage]
    act(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_data(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        verify(copy)


@pytest.mark.parametrize("name", ["train-00000.bin", "val-00000.bin"])
def test_a_flipped_byte_is_found_by_verify(name: str, copy: Path) -> None:
    assert verify(copy).tokenizer.name == "bytes"
    _flip(copy / name)
    open_data(copy)
    with pytest.raises(ValueError, match=f"{name} .*SHA-256"):
        verify(copy)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared directory whose one shard has three whole MiB and a rest."""
    root = tmp_path_factory.mktemp("large")
    (root / "text.txt").write_bytes(np.random.default_rng(0).integers(97, 123, 1_600_000).astype("u1").tobytes())
    return prepare(str(root / "text.txt"), "bytes", root / "out", val_fraction=0, shard_tokens=1 << 26).path


def test_a_window_is_refused_if_a_mib_that_it_touches_is_damaged(large: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(large, tmp_path / "copy"))
    (shard,) = open_data(copy).manifest.shards["train"]
    content = (copy / shard.name).read_bytes()
    parts = [content[at : at + MIB] for at in range(0, len(content), MIB)]
    assert [len(part) for part in parts] == [MIB, MIB, MIB, len(content) - 3 * MIB]
    assert shard.sha256_per_mib == "".join(hashlib.sha256(part).hexdigest() for part in parts)
    flipped = bytearray(content)
    flipped[MIB + 5] ^= 1
    (copy / shard.name).write_bytes(flipped)
    damaged, clean = open_data(copy).stream(), open_data(large).stream()
    # (start, length) in ids of two bytes: before, after, up to the first byte and from the last byte on
    half = MIB // 2
    for start, length in [(0, 100), (3 * half, 90), (len(clean) - 50, 100), (half - 10, 10), (2 * half, 10)]:
        assert np.array_equal(damaged.window(start, length), clean.window(start, length))
    for start, length in [(half, 1), (half - 10, 11), (2 * half - 1, 1), (2 * half - 1, 100), (0, len(clean))]:
        with pytest.raises(ValueError, match=rf"{shard.name} .* {MIB:,} to {2 * MIB - 1:,}"):
            damaged.window(start, length)
    with pytest.raises(ValueError, match=f"{shard.name} .* bytes "):
        damaged.positions(256)


def test_an_id_beyond_the_vocabulary_is_found_by_verify(copy: Path) -> None:
    ids = np.fromfile(copy / "train-00000.bin", dtype="<u2")
    ids[7] = 300
    ids.tofile(copy / "train-00000.bin")
    digest = hashlib.sha256(ids.tobytes()).hexdigest()
    _edit(copy, lambda manifest: manifest["shards"]["train"][0].update(sha256=digest, sha256_per_mib=digest))
    with pytest.raises(ValueError, match=r"300.* 257"):
        verify(copy)


def test_wrong_counts_are_found_by_verify(copy: Path) -> None:
    _flip(copy / "counts.bin")
    with pytest.raises(ValueError, match=r"counts\.bin .*SHA-256"):
        verify(copy)
    with pytest.raises(ValueError, match=r"counts\.bin .*SHA-256"):
        open_data(copy).counts()
    # counts with their own hash that are not those of the shards
    body = (copy / "counts.bin").read_bytes()
    _edit(copy, lambda manifest: manifest.update(counts_sha256=hashlib.sha256(body).hexdigest()))
    with pytest.raises(ValueError, match="train shards"):
        verify(copy)


def test_the_type_follows_the_vocabulary() -> None:
    assert [dtype_for(size).str for size in (257, 1 << 16, (1 << 16) + 1)] == ["<u2", "<u2", "<u4"]


def test_a_stored_tokenizer_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(60)))
    data = prepare(str(tmp_path / "in.jsonl"), "bpe:300", tmp_path / "out", val_fraction=0.2)
    assert verify(data.path).tokenizer.file == "tokenizer.json"
    _resize(data.path / "tokenizer.json", 1)
    with pytest.raises(ValueError, match=r"tokenizer\.json .*SHA-256"):
        verify(data.path)
    (data.path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        open_data(data.path)
