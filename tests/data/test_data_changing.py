"""Text that changes while it is read, and text among which a command would write."""

import pytest

from spheret.data import open_named
from spheret.data.preparation import _Job

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
        with pytest.raises(ValueError, match="changed"):
            open_named(str(text), "bytes", quiet=True)
    assert prepared(tmp_path) == []
    (text / "a.txt").write_text(TEXT)
    data = open_named(str(text), "bytes", quiet=True)
    assert sum(data.manifest.tokens.values()) == len(TEXT) + sum(data.manifest.documents.values())
