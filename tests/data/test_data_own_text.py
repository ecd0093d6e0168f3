"""Text of one's own: opened by its path, prepared into the cache, and split by position if its documents are few."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from spheret.data import open_named, prepare
from spheret.data.preparation import _Job
from spheret.data.split import FEWEST_DOCUMENTS, Split, choose, position

PARAGRAPH = "The state of the retraction is round. It was round last year, and it will be round again.\n"


def text(size: int) -> str:
    """Numbered paragraphs of about this many bytes."""
    lines = [f"{number}. {PARAGRAPH}\n" for number in range(size // len(PARAGRAPH) + 1)]
    return "".join(lines)[:size]


@pytest.mark.parametrize("size", [2_000, 40_000, 60_000, 97_000, 700_000])
def test_a_small_text_is_split_at_its_fraction(size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.txt"
    file.write_text(text(size))
    data = open_named(str(file), None, quiet=False)
    assert data.manifest.tokenizer.name == "bytes"
    assert data.manifest.split == "position"
    # each part is followed by the end of text
    assert data.tokens("train") + data.tokens("val") == size + sum(data.manifest.documents.values())
    assert 0.02 < data.tokens("val") / size < 0.08
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{file} as bytes: train {data.tokens('train'):,} tokens in ")
    assert "val is the last 0.05 of each" in line


def test_the_same_content_is_opened_and_another_is_prepared(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "my.txt"
    file.write_text(text(5_000))
    first = open_named(str(file), None, quiet=True)
    assert first.path.is_relative_to(cache)
    os.utime(file, (1, 1))
    (tmp_path / "copy").mkdir()
    shutil.copy(file, tmp_path / "copy" / "my.txt")
    written = (first.path / "manifest.json").stat().st_mtime_ns
    for same in (file, tmp_path / "copy" / "my.txt"):
        assert open_named(str(same), None, quiet=True).path == first.path
    assert (first.path / "manifest.json").stat().st_mtime_ns == written
    assert open_named(str(file), "bpe:300", quiet=True).path != first.path
    # as long as before
    file.write_text(text(5_000).replace("round", "green"))
    other = open_named(str(file), None, quiet=True)
    assert other.path != first.path
    assert other.manifest.corpus.documents_sha256 != first.manifest.corpus.documents_sha256


@pytest.mark.parametrize("change", ["grown", "replaced", "deleted"])
def test_text_that_changes_while_it_is_read_is_not_kept(
    change: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lie in the cache under the hash of what it was."""
    file, write = tmp_path / "my.txt", _Job._write
    file.write_text(text(5_000))

    def changing(job: _Job, *words: Any) -> Any:
        if change != "deleted":
            file.write_text(text(10_000) if change == "grown" else text(5_000).upper())
        result = write(job, *words)
        if change == "deleted":
            file.unlink()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(_Job, "_write", changing)
        with pytest.raises(ValueError, match="changed"):
            open_named(str(file), "bytes", quiet=True)
    assert list((cache / "data").glob("*/*")) == []
    file.write_text(text(5_000))
    data = open_named(str(file), "bytes", quiet=True)
    assert sum(data.manifest.tokens.values()) == 5_000 + sum(data.manifest.documents.values())


def test_a_prepared_directory_opens_as_such_and_an_unfinished_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(text(5_000))
    data = prepare(str(tmp_path / "my.txt"), "bytes", tmp_path / "out")
    assert open_named(str(tmp_path / "out"), None, quiet=True) == data
    (data.path / "manifest.json").rename(data.path / "progress.json")
    with pytest.raises(ValueError, match="spheret prepare"):
        open_named(str(tmp_path / "out"), None, quiet=True)


def test_many_documents_are_split_by_their_hash(tmp_path: Path) -> None:
    documents = [f"{number} {PARAGRAPH}".encode() for number in range(400)]
    assert choose(documents, 0.05) == Split(0.05)
    assert choose(documents, 0.0) == Split(0.0)
    enough = round(FEWEST_DOCUMENTS / 0.05)
    assert choose(documents[:enough], 0.05) == Split(0.05)
    assert choose(documents[: enough - 1], 0.05) == Split(0.05, by_position=True)
    # a split without any document
    train = [each for each in documents if next(Split(0.05).parts(each))[0] == "train"]
    assert choose(train, 0.05) == Split(0.05, by_position=True)
    # the manifest of such data has no new key
    for number, document in enumerate(documents):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number:03d}.txt").write_bytes(document)
    data = prepare(str(tmp_path / "texts"), "bytes", tmp_path / "out")
    assert b'"split"' not in (data.path / "manifest.json").read_bytes()
    below = [each for each in documents if int(hashlib.sha256(each).hexdigest()[:16], 16) < 0.05 * 2**64]
    assert data.manifest.documents["val"] == len(below)


def test_a_document_is_cut_at_the_best_place_near_its_fraction() -> None:
    words, line = b"word " * 20, b"x" * 99 + b"\n"
    cases = [
        # the nearest blank line within half of the part, though a line ends nearer
        (line * 8 + b"\n" + line * 2, 0.25, 801),
        (line * 10, 0.25, 700),
        (words, 0.1, 90),
        (b"x" * 100, 0.1, 90),
        ("é".encode() * 50, 0.11, 88),
        # nothing to cut
        (b"text", 0.05, 4),
        (b"x", 0.9, 1),
    ]
    for document, fraction, place in cases:
        assert position(document, fraction) == place
        assert b"".join(part for _, part in Split(fraction, True).parts(document)) == document


def test_the_tokenizer_is_trained_on_the_training_part_alone(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(text(20_000)[:-1] + "\n" + "zyzzyva " * 125)
    data = open_named(str(tmp_path / "my.txt"), "bpe:400", quiet=True)
    assert len(data.tokenizer().encode("zyzzyva")) > 4
