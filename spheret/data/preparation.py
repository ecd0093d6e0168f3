"""Turn a corpus into shards: streamed, parallel and resumable. The same input always gives the same bytes."""

from __future__ import annotations

import errno
import hashlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from spheret.data import shards, tokenizers
from spheret.data.chunks import chunks, encode_chunks, repair
from spheret.data.corpora import CORPORA, Corpus, resolve
from spheret.data.manifest import (
    CorpusRecord,
    Manifest,
    ResumePoint,
    SettingsRecord,
    ShardRecord,
    TokenizerRecord,
    dtype_name,
)
from spheret.data.readers import Reader
from spheret.data.split import Split, choose
from spheret.data.store import Data, open_data
from spheret.data.workspace import Workspace
from spheret.support import files
from spheret.support.cache import cache_directory
from spheret.support.errors import shortened
from spheret.support.machine import cores
from spheret.support.meter import Meter
from spheret.support.ranges import check_count

SHARD_TOKENS = 1 << 26


def _documents(corpus: Corpus) -> Iterator[bytes]:
    """Yield the documents that are not empty."""
    for document in corpus.read(None):
        text, _ = repair(document)
        if text:
            yield text


def _texts(corpus: Corpus, split: Split) -> Iterator[str]:
    """Yield the documents of the train split, on which a tokenizer is trained."""
    for document in _documents(corpus):
        for name, part in split.parts(document):
            if name == "train":
                yield part.decode()


def _hex(total: int) -> str:
    """Return the sum of the documents' SHA-256 modulo 2^256, as the manifest holds it."""
    return f"{total % (1 << 256):064x}"


def cache_path(corpus: Corpus, tokenizer: str, val_fraction: float) -> Path:
    """Return the folder of a corpus in the cache. Every revision, or content of a user's files, has its own."""
    # a tokenizer.json may change at its place, and another one may have its name
    name = tokenizers.load(tokenizer).sha256[:16] if Path(tokenizer).suffix == ".json" else tokenizer
    version = corpus.signature[:16] if corpus.files else corpus.revision
    parts = [corpus.name[:40], version, name, f"val{val_fraction:g}"]
    return cache_directory() / "data" / re.sub(r"[^\w.=-]+", "_", "-".join(parts))


def check_numbers(val_fraction: float | None, workers: int | None, shard_tokens: int) -> None:
    """Raise if `prepare` does not take one of these numbers."""
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise ValueError(f"--val-fraction must be at least 0 and below 1, got {val_fraction}.")
    check_count("--workers", 1 if workers is None else workers, most=8 * cores())
    check_count("--shard-tokens", shard_tokens)


def prepare(
    corpus: str,
    tokenizer: str | None = None,
    out: str | Path | None = None,
    *,
    val_fraction: float | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    files: str | None = None,
    column: str = "text",
    quiet: bool = True,
) -> Data:
    """Write a corpus as shards into `out`, and open the result.

    The same call again finishes what an earlier one began, or opens what is finished. A call with other settings is
    refused, and the message names the difference. Nothing is overwritten.

    Args:
        corpus: a name in CORPORA, or a file, folder or glob.
        tokenizer: `bytes`, `gpt2`, `bpe:N` or a path to a tokenizer.json; None takes the default of the corpus,
            which is `gpt2` for corpora of the hub and `bytes` for all other text.
        out: the directory to write. A named corpus may leave it out and goes to the cache.
        val_fraction: the share of documents in the validation split; None takes the default of the corpus.
        workers: the number of tokenizing threads; None takes one per core. The output does not depend on it.
        shard_tokens: the number of ids per shard.
        files: a glob of parquet files, the local copy of a hub corpus.
        column: the column of .jsonl and .parquet files that holds the text.
        quiet: show no progress.
    """
    check_numbers(val_fraction, workers, shard_tokens)
    source = resolve(corpus, files, column)
    # a token is rarely more than eight bytes of text, so this many shards would be too many
    if source.size is not None and source.size / 8 / shard_tokens > shards.MOST_SHARDS:
        raise ValueError(
            f"--shard-tokens {shard_tokens} would cut {source.size:,} bytes of text into more than "
            f"{shards.MOST_SHARDS:,} shards: give at least {-(-source.size // shards.MOST_SHARDS)}."
        )
    if out is None and corpus not in CORPORA:
        raise ValueError(f"--out is needed for the path {corpus}: give the directory to write into.")
    spec, fraction, directory = place(source, tokenizer, out, val_fraction)
    return prepare_into(source, spec, directory, fraction, shard_tokens, workers, quiet)


def place(
    source: Corpus, tokenizer: str | None, out: str | Path | None, val_fraction: float | None
) -> tuple[str, float, Path]:
    """Return the tokenizer and the validation share, by default the corpus's own, and where its data lies."""
    spec = source.tokenizer if tokenizer is None else tokenizer
    fraction = source.val_fraction if val_fraction is None else float(val_fraction)
    return spec, fraction, cache_path(source, spec, fraction) if out is None else Path(out).expanduser()


def prepare_into(
    source: Corpus,
    spec: str,
    directory: Path,
    fraction: float,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    quiet: bool = True,
) -> Data:
    """Write a corpus into a directory, or go on with it, and open the result."""
    if source.root is not None and directory.resolve().is_relative_to(source.root):
        raise ValueError(f"--out {directory} lies inside the corpus {source.root} and would change it: give another.")
    job = _Job(source, spec, directory, fraction, shard_tokens, workers or cores(), quiet)
    with Workspace(directory) as workspace:
        manifest = workspace.manifest()
        if manifest is not None:
            job.compare(manifest)
            workspace.tidy()
            if not quiet:
                print(f"{directory} is finished already, with these settings: nothing to do.", file=sys.stderr)
        else:
            if source.hidden and not quiet:
                names = shortened(", ".join(path.name for path in source.hidden), 300)
                print(f"left out, because their names begin with a dot: {names}", file=sys.stderr)
            try:
                job.run(workspace)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                kept = "finished work is kept" if workspace.resumable else "nothing was kept"
                raise OSError(
                    f"no space left for {directory}, and {kept}: free some space and run the same command again."
                ) from error
    return open_data(directory)


@dataclass
class _Job:
    """One preparation: its corpus, its settings and its directory."""

    corpus: Corpus
    spec: str
    directory: Path
    val_fraction: float
    shard_tokens: int
    workers: int
    quiet: bool

    @cached_property
    def split(self) -> Split:
        """How the documents are divided. Only a user's own files may be too few to set whole documents aside."""
        return choose(_documents(self.corpus), self.val_fraction) if self.corpus.files else Split(self.val_fraction)

    def settings(self) -> SettingsRecord:
        """Return the settings of this preparation that decide its output."""
        path = Path(self.spec).expanduser()
        own = path.suffix == ".json"
        return SettingsRecord(
            corpus=self.corpus.name,
            revision=self.corpus.revision,
            tokenizer=path.name if own else self.spec,
            val_fraction=self.val_fraction,
            shard_tokens=self.shard_tokens,
            files=self.corpus.signature,
            tokenizer_sha256=tokenizers.load(self.spec).sha256 if own else None,
            split="position" if self.split.by_position else msgspec.UNSET,
        )

    def compare(self, manifest: Manifest) -> None:
        """Raise unless a finished directory holds what this preparation would write."""
        settings = self.settings()
        finished = {
            "corpus": manifest.corpus.name,
            "revision": manifest.corpus.revision,
            "tokenizer": manifest.tokenizer.name,
            "val_fraction": manifest.val_fraction,
            "shard_tokens": manifest.shard_tokens,
        }
        differences = [
            f"{key} {value!r}, not {wanted!r}"
            for key, value in finished.items()
            if value != (wanted := getattr(settings, key))
        ]
        # equal names and revisions do not mean equal files
        if not differences and self.corpus.signature:
            total = sum(int.from_bytes(hashlib.sha256(text).digest(), "big") for text in _documents(self.corpus))
            changed = _hex(total) != manifest.corpus.documents_sha256
            differences = ["text that has changed since"] if changed else []
        if not differences and settings.tokenizer_sha256 not in (None, manifest.tokenizer.sha256):
            differences = ["a different tokenizer"]
        if differences:
            raise FileExistsError(
                f"{self.directory} already holds other data ({'; '.join(differences)}): give another --out, or "
                f"delete it."
            )

    def run(self, workspace: Workspace) -> None:
        """Tokenize from the start, or from the last note of an earlier call, and write the manifest last."""
        settings = self.settings()
        position = workspace.begin(settings)
        # a cursor that does not fit is found before anything is changed
        reader = self.corpus.read(None if position is None else position.cursor)
        tokenizer = self._tokenizer(position)
        dtype = shards.dtype_for(tokenizer.vocab_size)
        writers = {
            split: shards.SplitWriter(
                self.directory, split, dtype, self.shard_tokens, 0 if position is None else position.tokens[split]
            )
            for split in shards.SPLITS
        }
        try:
            counts, digest = self._write(workspace, settings, position, reader, tokenizer, writers)
        finally:
            for writer in writers.values():
                writer.close()
        try:
            self.corpus.check_unchanged()
        except ValueError:
            # also what earlier calls wrote may be of a different text
            workspace.fresh = True
            raise
        workspace.finish(self._manifest(tokenizers.describe(tokenizer), counts, digest, writers))

    def _tokenizer(self, position: ResumePoint | None) -> tokenizers.Tokenizer:
        """Return the tokenizer. Writes its file if its name is not enough."""
        if position is not None:
            return tokenizers.stored(self.directory, position.tokenizer)
        tokenizer = tokenizers.load(self.spec, _texts(self.corpus, self.split))
        if tokenizer.file is not None:
            files.write_atomically(self.directory / shards.TOKENIZER, tokenizer.file)
        return tokenizer

    def _write(
        self,
        workspace: Workspace,
        settings: SettingsRecord,
        position: ResumePoint | None,
        reader: Reader,
        tokenizer: tokenizers.Tokenizer,
        writers: dict[str, shards.SplitWriter],
    ) -> tuple[Counter[str], int]:
        """Write every document that is left and note the progress after each shard. Returns counts and digest."""
        counts: Counter[str] = Counter()
        digest = 0
        if position is not None:
            counts.update(position.counts)
            digest = int(position.digest, 16)
        description = tokenizers.describe(tokenizer)
        done = sum(writer.tokens for writer in writers.values())
        with Meter(f"prepare {self.corpus.name}", self.quiet) as meter:
            before = done

            def show(fraction: float | None) -> None:
                meter.show(f"{done:,} tokens, {(done - before) / meter.seconds:,.0f} tokens/s", fraction)

            show(reader.fraction())
            for chunk, encoded in encode_chunks(chunks(reader), tokenizer, self.split, self.workers):
                shard_finished = [writers[split].append(ids) for split, ids in encoded.ids.items()]
                counts.update(chunk.counts)
                counts.update(encoded.documents)
                digest += encoded.digest
                done += sum(map(len, encoded.ids.values()))
                if any(shard_finished):
                    for writer in writers.values():
                        writer.sync()
                    position = ResumePoint(
                        tokenizer=description,
                        counts=cast(Any, dict(counts)),
                        digest=_hex(digest),
                        cursor=chunk.cursor,
                        tokens={split: writer.tokens for split, writer in writers.items()},
                    )
                    workspace.record(settings, position)
                show(chunk.fraction)
        self._check_splits(counts)
        for writer in writers.values():
            writer.finish()
        return counts, digest

    def _check_splits(self, counts: Counter[str]) -> None:
        """Raise if a split is empty."""
        documents = counts["train"] + counts["val"]
        if not documents:
            raise ValueError(
                f"the corpus {self.corpus.name} is empty: {counts['empty']} documents, none with any text."
            )
        empty = [split for split in shards.SPLITS if not counts[split]]
        if empty and self.val_fraction:
            larger = min(0.5, max(2 * self.val_fraction, 3 / documents))
            raise ValueError(
                f"none of the {documents} documents fell into the {empty[0]} split with a share of "
                f"{self.val_fraction:g} for validation: give more documents, or prepare them with spheret prepare "
                f"--val-fraction {larger:.2g}, or 0 for no validation."
            )

    def _manifest(
        self, tokenizer: TokenizerRecord, counts: Counter[str], digest: int, writers: dict[str, shards.SplitWriter]
    ) -> Manifest:
        """Read the shards back, and return the manifest that describes what is on the disk."""
        dtype, vocab_size = shards.dtype_for(tokenizer.vocab_size), tokenizer.vocab_size
        unigrams = np.zeros(vocab_size, dtype="<u8")
        records: dict[str, list[ShardRecord]] = {split: [] for split in writers}
        for split, writer in writers.items():
            for name in writer.names:
                shard_counts, record = shards.scan(self.directory / name, dtype, vocab_size)
                records[split].append(record)
                if split == "train":
                    unigrams += shard_counts
        files.write_atomically(self.directory / shards.COUNTS, unigrams.tobytes())
        return Manifest(
            corpus=CorpusRecord(
                name=self.corpus.name,
                revision=self.corpus.revision,
                licence=self.corpus.licence,
                documents_sha256=_hex(digest),
            ),
            tokenizer=tokenizer,
            dtype=dtype_name(vocab_size),
            val_fraction=self.val_fraction,
            shard_tokens=self.shard_tokens,
            documents={split: counts[split] for split in shards.SPLITS},
            tokens={split: writer.tokens for split, writer in writers.items()},
            empty_documents=counts["empty"],
            repaired_documents=counts["repaired"],
            replaced_characters=counts["replaced_characters"],
            largest_id=max(shard.largest_id for shard in itertools.chain(*records.values())),
            counts_sha256=hashlib.sha256(unigrams.tobytes()).hexdigest(),
            shards=records,
            split="position" if self.split.by_position else msgspec.UNSET,
        )
