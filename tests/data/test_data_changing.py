"""Text that changes while it is read, and text among which a command would write."""

import pytest
from small_models import TINY as SMALL
from small_models import randomize

from spheret import GPT, GPTConfig
from spheret.cli import main
from spheret.data import named, open_named, preparation
from spheret.data.preparation import _Job
from spheret.data.tokenizers import describe, load
from spheret.runs.run import create_run

TEXT = "some words about a sphere, and more of them.\n" * 400


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    return tmp_path / "texts"


def prepared(tmp_path):
    return sorted((tmp_path / "cache" / "data").glob("*/*")) if (tmp_path / "cache").exists() else []


@pytest.mark.parametrize("change", ["grown", "replaced", "deleted"])
def test_text_that_changes_is_not_kept(text, tmp_path, monkeypatch, change):
    """It would lie in the cache under the hash of what it was."""
    write = _Job._write

    def changing(self, *words):
        file = text / "a.txt"
        if change == "deleted":
            result = write(self, *words)
            file.unlink()
            return result
        file.write_text(TEXT * 2 if change == "grown" else TEXT.upper())
        return write(self, *words)

    with monkeypatch.context() as patch:
        patch.setattr(_Job, "_write", changing)
        with pytest.raises(ValueError, match="has changed while it was read"):
            open_named(str(text), "bytes", quiet=True)
    assert prepared(tmp_path) == []
    (text / "a.txt").write_text(TEXT)
    data = open_named(str(text), "bytes", quiet=True)
    assert sum(data.manifest.tokens.values()) == len(TEXT) + sum(data.manifest.documents.values())


def test_another_text_before_a_kill_is_not_kept(text, tmp_path, monkeypatch):
    """The text is replaced, a kill follows, and then the first text is there again."""
    monkeypatch.setattr(preparation, "CHECKPOINT_TOKENS", 1)
    manifest = _Job._manifest

    def killed(self, *words):
        raise KeyboardInterrupt

    content = named._content
    with monkeypatch.context() as patch:
        patch.setattr(_Job, "_manifest", killed)
        patch.setattr(_Job, "_check_unchanged", lambda *_: None)

        def replaced(source):
            hashed = content(source)
            (text / "a.txt").write_text(TEXT.upper())
            return hashed

        patch.setattr(named, "_content", replaced)
        with pytest.raises(KeyboardInterrupt):
            open_named(str(text), "bytes", quiet=True)
    assert _Job._manifest is manifest
    (text / "a.txt").write_text(TEXT)
    with pytest.raises(ValueError, match="was another text when this preparation began"):
        open_named(str(text), "bytes", quiet=True)
    assert prepared(tmp_path) == []
    data = open_named(str(text), "bytes", quiet=True)
    assert TEXT[:100] in data.decode(data.stream("train").window(0, data.tokens("train")))


TINY = (
    "--layers", "1", "--heads", "1", "--width", "8", "--block", "8", "--batch-size", "1", "--steps", "1",
    "--eval-windows", "1", "--threads", "1", "--quiet",
)  # fmt: skip


@pytest.mark.parametrize(
    ("data", "out", "refused"),
    [
        (".", "run", True),
        (".", "deep/run", True),
        ("**/*.txt", "run", True),
        ("texts", "texts/run", True),
        ("texts", "run", False),
        ("texts/*.txt", "run", False),
        # a glob that is not recursive reaches the files of a directory that its folders match
        ("*/*", "run", True),
        ("*/*", "texts/run", False),
        ("*/*/*", "texts/run", True),
        ("t*/*", "run", False),
        ("texts/*", "texts/run", False),
    ],
)
def test_no_output_among_the_text(text, tmp_path, monkeypatch, capsys, data, out, refused):
    """The second start would read the first one's files as text, and find other data."""
    monkeypatch.chdir(tmp_path)
    words = ["train", *TINY, "--data", data, "--out", out, "--scheme", "pre-ln", "--no-tensorboard"]
    assert main(words) == (2 if refused else 0)
    if refused:
        assert f"--out {out} lies inside --data {data}" in capsys.readouterr().err
        assert not (tmp_path / out).exists()
    else:
        # the same command finds the same data
        assert main(words) == 0


@pytest.mark.parametrize(
    ("command", "out", "data", "refused"),
    [
        ("inspect", "texts/other", "texts", True),
        ("inspect", "texts/other", "texts/*/*", True),
        ("inspect", "texts/other", "texts/*", False),
        ("certify", "texts/other", "texts", True),
        ("explore", "texts/explorer.html", "texts", True),
        ("explore", "texts/explorer.html", "texts/*", True),
        ("explore", "explorer.html", "texts", False),
    ],
)
def test_no_measurement_among_the_text(text, tmp_path, monkeypatch, capsys, command, out, data, refused):
    monkeypatch.chdir(tmp_path)
    create_run("run", randomize(GPT(GPTConfig(**{**SMALL, "vocab": 257}))), describe(load("bytes")))
    assert main([command, "run", "--data", data, "--out", out]) == (2 if refused else 0)
    assert (f"--out {out} lies inside --data {data}" in capsys.readouterr().err) == refused
    assert (tmp_path / out).exists() != refused
