"""The files of a data directory: shards of little-endian ids, counts, and a manifest that is written last."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from spheret.data.manifest import (
    MANIFESTS,
    MIB,
    Manifest,
    ShardRecord,
    SplitRecord,
    check_ids,
    dtype_name,
    shard_name,
)
from spheret.data.manifest import SPLITS as SPLITS
from spheret.data.manifest import TOKENIZER as TOKENIZER
from spheret.support import files
from spheret.support.documents import read_bytes

MANIFEST = "manifest.json"
# the state of an unfinished preparation
PROGRESS = "progress.json"
# how often each id occurs in the train split: little-endian uint64, one per id
COUNTS = "counts.bin"
# names have five digits
MOST_SHARDS = 100_000
# the largest tokenizer.json in use has some 35 MB
MOST_OF_TOKENIZER = 1 << 28


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the smaller of little-endian uint16 and uint32 that holds every id."""
    return np.dtype(dtype_name(vocab_size)).newbyteorder("<")


def is_shard(name: str, split: str = "|".join(SPLITS)) -> bool:
    """Whether a file has the name of a shard, finished or not."""
    return re.fullmatch(rf"({split})-\d{{5}}\.bin(\.part)?", name) is not None


class SplitWriter:
    """Writes the shards of one split.

    Ids are appended to a .part file, which is renamed once it holds `shard_tokens` ids.
    state: what `sync` returned, to go on from there.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        dtype: np.dtype[Any],
        shard_tokens: int,
        state: SplitRecord | None = None,
    ) -> None:
        self._directory, self._split, self._dtype, self._size = directory, split, dtype, shard_tokens
        self.shards: list[ShardRecord] = [] if state is None else list(state.shards)
        self._tokens, self._largest, self._hash = 0, 0, hashlib.sha256()
        self._file: IO[bytes] | None = None
        self._restore(state)

    @property
    def tokens(self) -> int:
        """The number of ids in the split so far."""
        return sum(shard.tokens for shard in self.shards) + self._tokens

    @property
    def _final(self) -> Path:
        return self._directory / shard_name(self._split, len(self.shards))

    @property
    def _part(self) -> Path:
        return self._final.with_name(self._final.name + ".part")

    def _restore(self, state: SplitRecord | None) -> None:
        """Return to a recorded state: `partial` ids in the unfinished shard, and nothing after them."""
        partial = 0 if state is None else state.partial
        for shard in self.shards:
            check_size(self._directory / shard.name, shard.tokens, self._dtype)
        # a kill came after the rename and before the note of it: the finished shard counts as unfinished
        if partial and self._final.exists():
            os.replace(self._final, self._part)
        known = {shard.name for shard in self.shards} | ({self._part.name} if partial else set())
        for path in self._directory.iterdir():
            if is_shard(path.name, self._split) and path.name not in known:
                path.unlink()
        if state is None or not partial:
            return
        length = partial * self._dtype.itemsize
        self._file = self._open()
        if os.fstat(self._file.fileno()).st_size < length:
            raise ValueError(f"{self._part} is shorter than recorded: delete {self._directory} and prepare it again.")
        self._file.truncate(length)
        for block in read_blocks(self._part, self._dtype):
            self._add(block)
        if self._hash.hexdigest() != state.partial_sha256:
            self.close()
            raise ValueError(f"{self._part} has changed since: delete {self._directory} and prepare it again.")

    def _open(self) -> IO[bytes]:
        """Open the unfinished shard for appending. It is made if it is missing, and no link is followed."""
        try:
            handle = files.open_regular(self._part, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except files.NotRegular as error:
            raise ValueError(
                f"{error}, and would be written to: remove it, and run the same command again."
            ) from None
        return os.fdopen(handle, "ab", buffering=0)

    def _add(self, ids: np.ndarray) -> None:
        """Update the unfinished shard's hash, length and largest id."""
        self._hash.update(ids.data)
        self._tokens += len(ids)
        self._largest = max(self._largest, int(ids.max(initial=0)))

    def append(self, ids: np.ndarray) -> bool:
        """Append ids. Returns whether that finished a shard."""
        finished = False
        while len(ids):
            if self._file is None:
                if len(self.shards) == MOST_SHARDS:
                    raise ValueError(
                        f"the {self._split} split has more than {MOST_SHARDS:,} shards of {self._size:,} tokens: "
                        f"give a larger --shard-tokens."
                    )
                self._file = self._open()
            head, ids = np.split(ids, [self._size - self._tokens])
            head = np.ascontiguousarray(head, dtype=self._dtype)
            with files.naming(self._part):
                files.write_all(self._file, head.data)
            self._add(head)
            if self._tokens == self._size:
                self._finish_shard()
                finished = True
        return finished

    def _finish_shard(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._part, self._final)
        files.sync_directory(self._directory)
        self.shards.append(
            ShardRecord(
                name=self._final.name,
                tokens=self._tokens,
                sha256=self._hash.hexdigest(),
                largest_id=self._largest,
            )
        )
        self._tokens, self._largest, self._hash = 0, 0, hashlib.sha256()

    def sync(self) -> SplitRecord:
        """Flush everything to disk. Returns the state from which a new writer can go on."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        return SplitRecord(shards=list(self.shards), partial=self._tokens, partial_sha256=self._hash.hexdigest())

    def finish(self) -> None:
        """Finish the last shard, which may be shorter than the others."""
        if self._file is not None:
            self._finish_shard()

    def close(self) -> None:
        """Close the open file. Everything on disk stays for a later run."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def read_blocks(path: Path, dtype: np.dtype[Any], tokens: int = 1 << 22) -> Iterator[np.ndarray]:
    """Yield the ids of a shard, `tokens` at a time."""
    with files.naming(path), path.open("rb") as file:
        while block := file.read(tokens * dtype.itemsize):
            yield np.frombuffer(block, dtype=dtype)


def check_size(path: Path, tokens: int, dtype: np.dtype[Any]) -> None:
    """Raise unless the file exists and has exactly the size that the manifest gives."""
    remedy = f"prepare {path.parent} again, or copy the file again"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {remedy}.")
    size, expected = path.stat().st_size, tokens * dtype.itemsize
    if size != expected:
        raise ValueError(f"{path} has {size:,} bytes where the manifest says {expected:,}: {remedy}.")


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a data directory. Raises unless it has this version and every field is valid."""
    path = directory / MANIFEST
    try:
        return MANIFESTS.read(path)
    except FileNotFoundError:
        hint = (
            "its preparation did not finish: run the same spheret prepare command again"
            if (directory / PROGRESS).exists()
            else "make it with spheret prepare CORPUS --out DIR"
        )
        raise FileNotFoundError(f"{directory} holds no {MANIFEST}: {hint}.") from None


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise unless every file of the manifest exists and has the size that the manifest gives."""
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    for split in SPLITS:
        for shard in manifest.shards[split]:
            check_size(directory / shard.name, shard.tokens, dtype)
    check_size(directory / COUNTS, manifest.tokenizer.vocab_size, np.dtype("<u8"))
    if manifest.tokenizer.file is not None and not (directory / TOKENIZER).is_file():
        raise FileNotFoundError(f"{directory / TOKENIZER} is missing: prepare {directory} again, or copy it again.")


def read_tokenizer(path: Path) -> bytes:
    """The bytes of a tokenizer.json."""
    return read_bytes(path, MOST_OF_TOKENIZER, "give another tokenizer.json, or copy it again", follow=True)


def check_hash(path: Path, digest: str, expected: str, where: str = "") -> None:
    """Raise unless a file, or the part of it that `where` names, has the SHA-256 that the manifest gives."""
    if digest != expected:
        raise ValueError(
            f"{path} is damaged{where}: its SHA-256 is {digest}, the manifest says {expected}. Prepare the directory "
            f"again, or copy the file again."
        )


def read_counts(directory: Path, manifest: Manifest) -> np.ndarray:
    """Return how often each id occurs in the train split: (vocab_size,) uint64. Raises if the file is damaged."""
    data = read_bytes(directory / COUNTS, 8 * manifest.tokenizer.vocab_size, "copy the file again", follow=True)
    check_hash(directory / COUNTS, hashlib.sha256(data).hexdigest(), manifest.counts_sha256)
    return np.frombuffer(data, dtype="<u8")


def scan(path: Path, dtype: np.dtype[Any], vocab_size: int, shard: ShardRecord) -> tuple[np.ndarray, str]:
    """Return how often each id occurs in a shard, and its `sha256_per_mib`.

    Raises if a SHA-256 differs from the record's or an id is too large.
    """
    digest, counts = hashlib.sha256(), np.zeros(vocab_size, dtype="<u8")
    largest, per_mib = 0, []
    for block in read_blocks(path, dtype):
        digest.update(block.data)
        # a block is a multiple of a MiB, except the last one
        content = block.data.cast("B")
        per_mib += [hashlib.sha256(content[at : at + MIB]).hexdigest() for at in range(0, len(content), MIB)]
        block_counts = np.bincount(block, minlength=vocab_size)
        largest = max(largest, len(block_counts) - 1 if len(block_counts) > vocab_size else 0)
        counts += block_counts[:vocab_size].astype("<u8")
    check_hash(path, digest.hexdigest(), shard.sha256)
    hashes = "".join(per_mib)
    if shard.sha256_per_mib and shard.sha256_per_mib != hashes:
        raise ValueError(f"sha256_per_mib of {path} is damaged in the manifest: prepare the directory again.")
    check_ids(path, largest, vocab_size)
    return counts, hashes


def verify(directory: Path) -> Manifest:
    """Compare every byte of a data directory with its manifest. Returns the manifest.

    Args:
        directory: what `spheret prepare` wrote.
    """
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    dtype, vocab_size = np.dtype(manifest.dtype).newbyteorder("<"), manifest.tokenizer.vocab_size
    counts = np.zeros(vocab_size, dtype="<u8")
    for split in SPLITS:
        for shard in manifest.shards[split]:
            shard_counts, _ = scan(directory / shard.name, dtype, vocab_size, shard)
            if split == "train":
                counts += shard_counts
    if manifest.tokenizer.file is not None:
        digest = hashlib.sha256(read_tokenizer(directory / TOKENIZER)).hexdigest()
        check_hash(directory / TOKENIZER, digest, manifest.tokenizer.sha256)
    if read_counts(directory, manifest).tobytes() != counts.tobytes():
        raise ValueError(f"{directory / COUNTS} does not match the train shards: prepare the directory again.")
    return manifest
