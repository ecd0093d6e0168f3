"""From a corpus to shards: streamed, parallel, resumable, and the same bytes however it was run."""

from __future__ import annotations

import errno
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spheret.data import shards, tokenizers
from spheret.data.chunks import chunks, repair
from spheret.data.corpora import CORPORA, Corpus, resolve
from spheret.data.store import Data, open_data
from spheret.data.workers import Team, validates
from spheret.data.workspace import Workspace
from spheret.support import files
from spheret.support.cache import cache_directory
from spheret.support.machine import cores
from spheret.support.meter import Meter

SHARD_TOKENS = 1 << 26
# what a kill can lose at most
CHECKPOINT_TOKENS = 1 << 24


def _texts(corpus: Corpus, val_fraction: float) -> Iterator[str]:
    """The train split's documents, for a tokenizer to learn from."""
    for document in corpus.read(None):
        text, _ = repair(document)
        if text and not validates(hashlib.sha256(text).digest(), val_fraction):
            yield text.decode()


def _documents_digest(corpus: Corpus) -> str:
    total = 0
    for document in corpus.read(None):
        text, _ = repair(document)
        if text:
            total += int.from_bytes(hashlib.sha256(text).digest(), "big")
    return _hex(total)


def _hex(total: int) -> str:
    return f"{total % (1 << 256):064x}"


def cache_path(corpus: Corpus, tokenizer: str, val_fraction: float) -> Path:
    """The folder of a named corpus in the cache: another revision or split is another folder."""
    words = [corpus.name, corpus.revision, tokenizer, f"val{val_fraction:g}"]
    return cache_directory() / "data" / re.sub(r"[^\w.=-]+", "_", "-".join(words))


def prepare(
    corpus: str,
    tokenizer: str = "gpt2",
    out: str | Path | None = None,
    *,
    val_fraction: float | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    files: str | None = None,
    column: str = "text",
    quiet: bool = True,
) -> Data:
    """Write a corpus as shards into `out`, or finish what a killed call began there, and open the result."""
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise ValueError(f"--val-fraction must be at least 0 and below 1, got {val_fraction}.")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}.")
    if shard_tokens < 1:
        raise ValueError(f"--shard-tokens must be at least 1, got {shard_tokens}.")
    source = resolve(corpus, files, column)
    fraction = source.val_fraction if val_fraction is None else float(val_fraction)
    if out is None and corpus not in CORPORA:
        raise ValueError(f"--out is needed for the path {corpus}: give the directory to write into.")
    directory = cache_path(source, tokenizer, fraction) if out is None else Path(out).expanduser()
    if source.root is not None and directory.resolve().is_relative_to(source.root):
        raise ValueError(f"--out {directory} lies inside the corpus {corpus}, which it would change: give another.")
    job = _Job(source, tokenizer, directory, fraction, shard_tokens, workers or cores(), quiet)
    with Workspace(directory) as workspace:
        manifest = workspace.manifest()
        if manifest is not None:
            job.compare(manifest)
            workspace.tidy()
        else:
            try:
                job.run(workspace)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                kept = "what is done is kept" if workspace.resumable else "nothing was kept"
                raise OSError(
                    f"no space left for {directory}, and {kept}: free some and run the same command again."
                ) from error
    return open_data(directory)


@dataclass
class _Job:
    corpus: Corpus
    spec: str
    directory: Path
    val_fraction: float
    shard_tokens: int
    workers: int
    quiet: bool

    def asked(self) -> dict[str, Any]:
        """What was asked for, as a manifest says it."""
        path = Path(self.spec).expanduser()
        return {
            "corpus": self.corpus.name,
            "revision": self.corpus.revision,
            "tokenizer": path.name if path.suffix == ".json" else self.spec,
            "val_fraction": self.val_fraction,
            "shard_tokens": self.shard_tokens,
        }

    def compare(self, manifest: dict[str, Any]) -> None:
        """Raise unless a finished directory is what this job would write."""
        asked = self.asked()
        found = {
            "corpus": manifest["corpus"]["name"],
            "revision": manifest["corpus"]["revision"],
            "tokenizer": manifest["tokenizer"]["name"],
            **{key: manifest[key] for key in ("val_fraction", "shard_tokens")},
        }
        wrong = [f"{key} {found[key]!r}, not {asked[key]!r}" for key in asked if asked[key] != found[key]]
        # a name does not say what is in the files
        if not wrong and self.corpus.signature:
            digest = manifest["corpus"]["documents_sha256"]
            wrong = ["text that has changed since"] if _documents_digest(self.corpus) != digest else []
        if not wrong and Path(self.spec).suffix == ".json":
            digest = manifest["tokenizer"]["sha256"]
            wrong = ["another tokenizer"] if tokenizers.load(self.spec).sha256 != digest else []
        if wrong:
            raise FileExistsError(
                f"{self.directory} already holds other data ({'; '.join(wrong)}): give another --out, or delete it."
            )

    def run(self, workspace: Workspace) -> None:
        """Tokenize from the start, or from where a killed run got to, and write the manifest last."""
        fingerprint = {**self.asked(), "version": shards.VERSION, "files": self.corpus.signature}
        if Path(self.spec).suffix == ".json":
            fingerprint["tokenizer_sha256"] = tokenizers.load(self.spec).sha256
        progress = workspace.progress(fingerprint)
        if progress is None:
            workspace.started = True
            progress = {}
            workspace.record(fingerprint, progress)
        with Team(self.directory, self.val_fraction, self.workers, self.corpus.size) as team:
            tokenizer = self._tokenizer(progress, team)
            dtype = shards.dtype_for(tokenizer.vocab_size)
            states = progress.get("splits", {})
            writers = {
                split: shards.SplitWriter(self.directory, split, dtype, self.shard_tokens, states.get(split))
                for split in shards.SPLITS
            }
            workspace.started = True
            try:
                counts, digest = self._write(workspace, fingerprint, progress, tokenizer, team, writers)
            finally:
                for writer in writers.values():
                    writer.close()
        workspace.finish(self._manifest(tokenizers.describe(tokenizer), counts, digest, writers))

    def _tokenizer(self, progress: dict[str, Any], team: Team) -> tokenizers.Tokenizer:
        """The tokenizer, its file written where its name is not enough, and the other processes told of it."""
        if "tokenizer" in progress:
            team.start(progress["tokenizer"]["name"])
            return tokenizers.stored(self.directory, progress["tokenizer"])
        # what is known by name, others can build while this process does
        if self.spec in tokenizers.TOKENIZERS:
            team.start(self.spec)
        tokenizer = tokenizers.load(self.spec, _texts(self.corpus, self.val_fraction))
        if tokenizer.file is not None:
            files.write_atomically(self.directory / shards.TOKENIZER, tokenizer.file)
            team.start(tokenizer.name)
        return tokenizer

    def _write(
        self,
        workspace: Workspace,
        fingerprint: dict[str, Any],
        progress: dict[str, Any],
        tokenizer: tokenizers.Tokenizer,
        team: Team,
        writers: dict[str, shards.SplitWriter],
    ) -> tuple[Counter[str], int]:
        """Every document that is left, with a note of the progress after each shard."""
        counts, digest = Counter(progress.get("counts", {})), int(progress.get("digest", "0"), 16)
        described = tokenizers.describe(tokenizer)
        reader = self.corpus.read(progress.get("cursor"))
        done = sum(writer.tokens for writer in writers.values())
        due = CHECKPOINT_TOKENS
        with Meter(f"prepare {self.corpus.name}", self.quiet) as meter:
            before = done

            def show(fraction: float | None) -> None:
                meter.show(f"{done:,} tokens, {(done - before) / meter.seconds:,.0f} tokens/s", fraction)

            show(reader.fraction())
            for chunk, encoded in team.encode(chunks(reader), tokenizer):
                finished = [writers[split].append(ids) for split, ids in encoded.ids.items()]
                counts.update(chunk.counts)
                counts.update(encoded.documents)
                digest += encoded.digest
                gained = sum(map(len, encoded.ids.values()))
                done, due = done + gained, due - gained
                if any(finished) or due <= 0:
                    due = CHECKPOINT_TOKENS
                    state = {
                        "tokenizer": described,
                        "counts": counts,
                        "digest": _hex(digest),
                        "cursor": chunk.cursor,
                        "splits": {split: writer.sync() for split, writer in writers.items()},
                    }
                    workspace.record(fingerprint, state)
                show(chunk.fraction)
        self._check_splits(counts)
        for writer in writers.values():
            writer.finish()
        return counts, digest

    def _check_splits(self, counts: Counter[str]) -> None:
        documents = counts["train"] + counts["val"]
        if not documents:
            raise ValueError(
                f"the corpus {self.corpus.name} is empty: {counts['empty']} documents, none with any text."
            )
        empty = [split for split in shards.SPLITS if not counts[split]]
        if empty and self.val_fraction:
            least = 3 / documents
            hint = f"give --val-fraction {min(0.5, max(2 * self.val_fraction, least)):.2g}, or 0 for no validation"
            raise ValueError(
                f"none of the {documents} documents fell into the {empty[0]} split with --val-fraction "
                f"{self.val_fraction:g}: {hint}."
            )

    def _manifest(
        self, tokenizer: dict[str, Any], counts: Counter[str], digest: int, writers: dict[str, shards.SplitWriter]
    ) -> dict[str, Any]:
        """Read the shards back, which checks that the disk has what was meant, and describe them."""
        dtype, vocab_size = shards.dtype_for(tokenizer["vocab_size"]), tokenizer["vocab_size"]
        unigrams = np.zeros(vocab_size, dtype="<u8")
        for split, writer in writers.items():
            for shard in writer.shards:
                found = shards.scan(self.directory / shard["name"], dtype, vocab_size, shard["sha256"])
                if split == "train":
                    unigrams += found
        files.write_atomically(self.directory / shards.COUNTS, unigrams.tobytes())
        asked = self.asked()
        return {
            "format": shards.FORMAT,
            "version": shards.VERSION,
            "corpus": {
                "name": asked["corpus"],
                "revision": asked["revision"],
                "licence": self.corpus.licence,
                "documents_sha256": _hex(digest),
            },
            "tokenizer": tokenizer,
            "dtype": dtype.name,
            "val_fraction": self.val_fraction,
            "shard_tokens": self.shard_tokens,
            "documents": {split: counts[split] for split in shards.SPLITS},
            "tokens": {split: writer.tokens for split, writer in writers.items()},
            "empty_documents": counts["empty"],
            "repaired_documents": counts["repaired"],
            "replaced_characters": counts["replaced_characters"],
            "largest_id": max(shard["largest_id"] for writer in writers.values() for shard in writer.shards),
            "counts_sha256": hashlib.sha256(unigrams.tobytes()).hexdigest(),
            "shards": {split: writer.shards for split, writer in writers.items()},
        }


def cached(corpus: str = "sotu", tokenizer: str = "gpt2", quiet: bool = True) -> Data:
    """A named corpus from the cache, prepared there the first time."""
    source = resolve(corpus) if corpus in CORPORA else None
    if source is not None:
        path = cache_path(source, tokenizer, source.val_fraction)
        if (path / shards.MANIFEST).exists():
            return open_data(path)
    return prepare(corpus, tokenizer, quiet=quiet)


def open_named(name: str, tokenizer: str | None, quiet: bool) -> Data:
    """A data directory, or a corpus by name, prepared into the cache with bytes unless told."""
    if name in CORPORA:
        return cached(name, tokenizer or "bytes", quiet=quiet)
    path = Path(name).expanduser()
    if not path.exists():
        known = ", ".join(CORPORA)
        raise FileNotFoundError(f"--data {name} is neither a directory nor a corpus: known corpora are {known}.")
    if not (path / shards.MANIFEST).exists():
        raise ValueError(f"--data {name} holds no prepared data: run spheret prepare {name} --out DIR and give DIR.")
    data = open_data(path)
    if tokenizer is not None and tokenizer != data.manifest["tokenizer"]["name"]:
        has = data.manifest["tokenizer"]["name"]
        raise ValueError(
            f"--data {name} was prepared with the tokenizer {has!r}, not {tokenizer!r}: leave --tokenizer out, or "
            f"prepare it again."
        )
    return data
