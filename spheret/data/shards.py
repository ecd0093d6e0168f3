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

from spheret.data.manifest import MANIFESTS, MIB, Manifest, ShardRecord, check_ids, dtype_name, shard_name
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
    tokens: how many ids the split has so far. What is there beyond them is removed.
    """

    def __init__(self, directory: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, tokens: int = 0) -> None:
        self._directory, self._split, self._dtype, self._size = directory, split, dtype, shard_tokens
        self.tokens = tokens
        self._file: IO[bytes] | None = None
        self._restore()

    @property
    def names(self) -> list[str]:
        """The names of all shards, with the unfinished one."""
        return [shard_name(self._split, number) for number in range(-(-self.tokens // self._size))]

    @property
    def _final(self) -> Path:
        return self._directory / shard_name(self._split, self.tokens // self._size)

    @property
    def _part(self) -> Path:
        return self._final.with_name(self._final.name + ".part")

    def _restore(self) -> None:
        whole, partial = divmod(self.tokens, self._size)
        for name in self.names[:whole]:
            check_size(self._directory / name, self._size, self._dtype)
        # a kill came after the rename and before the note of it: the finished shard counts as unfinished
        if partial and self._final.exists():
            os.replace(self._final, self._part)
        known = {*self.names[:whole], self._part.name} if partial else set(self.names)
        for path in self._directory.iterdir():
            if is_shard(path.name, self._split) and path.name not in known:
                path.unlink()
        if partial:
            length = partial * self._dtype.itemsize
            self._file = self._open()
            if os.fstat(self._file.fileno()).st_size < length:
                raise ValueError(
                    f"{self._part} is shorter than recorded: delete {self._directory} and prepare it again."
                )
            self._file.truncate(length)

    def _open(self) -> IO[bytes]:
        """Open the unfinished shard for appending. It is made if it is missing, and no link is followed."""
        try:
            handle = files.open_regular(self._part, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except files.NotRegular as error:
            raise ValueError(
                f"{error}, and would be written to: remove it, and run the same command again."
            ) from None
        return os.fdopen(handle, "ab", buffering=0)

    def append(self, ids: np.ndarray) -> bool:
        """Append ids. Returns whether that finished a shard."""
        finished = False
        while len(ids):
            if self._file is None:
                if self.tokens == MOST_SHARDS * self._size:
                    raise ValueError(
                        f"the {self._split} split has more than {MOST_SHARDS:,} shards of {self._size:,} tokens: "
                        f"give a larger --shard-tokens."
                    )
                self._file = self._open()
            head, ids = np.split(ids, [self._size - self.tokens % self._size])
            final, part = self._final, self._part
            with files.naming(part):
                files.write_all(self._file, np.ascontiguousarray(head, dtype=self._dtype).data)
            self.tokens += len(head)
            if self.tokens % self._size == 0:
                self._finish_shard(part, final)
                finished = True
        return finished

    def _finish_shard(self, part: Path, final: Path) -> None:
        self.sync()
        self.close()
        os.replace(part, final)
        files.sync_directory(self._directory)

    def sync(self) -> None:
        """Put everything on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Finish the last shard, which may be shorter than the others."""
        if self._file is not None:
            self._finish_shard(self._part, self._final)

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


def scan(path: Path, dtype: np.dtype[Any], vocab_size: int) -> tuple[np.ndarray, ShardRecord]:
    """Return how often each id occurs in a shard, and its record."""
    digest, counts = hashlib.sha256(), np.zeros(vocab_size, dtype="<u8")
    tokens, largest, per_mib = 0, 0, []
    for block in read_blocks(path, dtype):
        digest.update(block.data)
        # a block is a multiple of a MiB, except the last one
        content = block.data.cast("B")
        per_mib += [hashlib.sha256(content[at : at + MIB]).hexdigest() for at in range(0, len(content), MIB)]
        tokens, largest = tokens + len(block), max(largest, int(block.max()))
        counts += np.bincount(block, minlength=vocab_size)[:vocab_size].astype("<u8")
    return counts, ShardRecord(path.name, tokens, digest.hexdigest(), largest, "".join(per_mib))


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
            path = directory / shard.name
            shard_counts, found = scan(path, dtype, vocab_size)
            check_hash(path, found.sha256, shard.sha256)
            check_ids(path, found.largest_id, vocab_size)
            if found != shard:
                raise ValueError(f"the entry of {path} in the manifest is damaged: prepare the directory again.")
            if split == "train":
                counts += shard_counts
    if manifest.tokenizer.file is not None:
        digest = hashlib.sha256(read_tokenizer(directory / TOKENIZER)).hexdigest()
        check_hash(directory / TOKENIZER, digest, manifest.tokenizer.sha256)
    if read_counts(directory, manifest).tobytes() != counts.tobytes():
        raise ValueError(f"{directory / COUNTS} does not match the train shards: prepare the directory again.")
    return manifest
