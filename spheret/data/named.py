"""Open data by what a user gives: the name of a corpus, a prepared directory, or text of their own."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import sys
import time
from pathlib import Path

from spheret.data import shards, tokenizers
from spheret.data.corpora import CORPORA, Corpus, resolve
from spheret.data.preparation import cache_path, place, prepare, prepare_into
from spheret.data.store import Data, open_data


def cached(corpus: str = "sotu", tokenizer: str | None = None, quiet: bool = True) -> Data:
    """Open a named corpus from the cache. The first call prepares it, and calls of other processes wait for it.

    Args:
        corpus: a name in CORPORA.
        tokenizer: as in `spheret.data.prepare`; None takes the default of the corpus.
        quiet: show no progress.
    """
    if corpus in CORPORA:
        _, _, path = place(resolve(corpus), tokenizer, None, None)
        if (path / shards.MANIFEST).exists():
            return open_data(path)
    while True:
        try:
            return prepare(corpus, tokenizer, quiet=quiet)
        except BlockingIOError:
            time.sleep(0.2)


def check_named(name: str) -> None:
    """Raise at once if there can be no data of that name."""
    path = Path(name).expanduser()
    if name not in CORPORA and not path.exists() and not glob.has_magic(name):
        known = ", ".join(CORPORA)
        raise FileNotFoundError(
            f"--data {name} is neither a file nor a directory nor a corpus: known corpora are {known}."
        )
    if (path / shards.PROGRESS).exists() and not (path / shards.MANIFEST).exists():
        raise ValueError(
            f"--data {name} holds an unfinished preparation: run its spheret prepare again to finish it."
        )


def open_named(name: str, tokenizer: str | None, quiet: bool, out: Path | None = None) -> Data:
    """Open a data directory, a corpus by name, or a file, folder or glob of text. The cache holds what is prepared.

    tokenizer: None takes the default of the corpus. For a directory, it must be the one of the data.
    quiet: leave out the line on stderr that says how the user's own text is split.

    out: where the command writes. It may not lie below the text, or it would be text the next time.
    """
    check_named(name)
    if name in CORPORA:
        return cached(name, tokenizer, quiet=quiet)
    path = Path(name).expanduser()
    if not (path / shards.MANIFEST).exists():
        if out is not None:
            refuse_output_among_text(name, out)
        return _own_text(name, tokenizer, quiet)
    data = open_data(path)
    prepared_with = data.manifest.tokenizer.name
    if tokenizer is not None and tokenizer != prepared_with:
        raise ValueError(
            f"--data {name} was prepared with the tokenizer {prepared_with!r}, not {tokenizer!r}: leave --tokenizer "
            f"out, or prepare it again."
        )
    return data


def named_vocabulary(name: str, tokenizer: str | None) -> int:
    """The vocabulary size of what `open_named` opens, whether it is prepared or not. Nothing is written."""
    check_named(name)
    path = Path(name).expanduser()
    if name not in CORPORA and (path / shards.MANIFEST).exists():
        return open_named(name, tokenizer, quiet=True).vocab_size
    source = resolve(name)
    return tokenizers.vocabulary(tokenizer or source.tokenizer)


def refuse_output_among_text(name: str, out: Path) -> None:
    """Raise if `out`, a directory or a file, lies in a text's folder, or below the folder of a recursive glob."""
    path = Path(name).expanduser()
    if name in CORPORA or (path / shards.MANIFEST).exists():
        return
    recursive = path.parts.index("**") if "**" in path.parts else None
    folder = path if recursive is None else Path(*path.parts[:recursive])
    if folder.is_dir() and out.expanduser().resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--out {out} lies inside --data {name}, and would be read as text the next time: give an --out "
            "elsewhere, or only the folder of the text."
        )


def _own_text(name: str, tokenizer: str | None, quiet: bool) -> Data:
    """Prepare the user's own text into the cache, or open it there. Changed text is prepared anew."""
    source = resolve(name)
    spec = tokenizer or source.tokenizer
    # the content stands for the files: copied or touched ones are the same
    source = dataclasses.replace(source, signature=_content(source))
    directory = cache_path(source, spec, source.val_fraction)
    if (directory / shards.MANIFEST).exists():
        data = open_data(directory)
    else:
        data = prepare_into(source, spec, directory, source.val_fraction, quiet=quiet)
    if not quiet:
        print(f"{name} as {spec}: {data.manifest.summary()}.", file=sys.stderr, flush=True)
    return data


def _content(source: Corpus) -> str:
    """Return a hash of the names and bytes of the files of a corpus."""
    root = source.root or Path(os.path.commonpath([path.parent for path in source.files]))
    rows = []
    for path in source.files:
        with path.open("rb") as file:
            rows.append((path.relative_to(root).as_posix(), hashlib.file_digest(file, "sha256").hexdigest()))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
