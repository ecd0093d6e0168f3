"""Chunks of documents to ids, in order: in this process if there is little to do, else in others.

Other processes are fresh interpreters that talk over pipes: nothing is forked under running threads, nothing is
pickled, they load numpy and the tokenizer but no torch, and they end by themselves when this process does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from spheret.data import shards, tokenizers
from spheret.data.chunks import Chunk

# what all tasks under way may hold together
FLIGHT_BYTES = 1 << 26
# a corpus below this is done before other processes would have paid for their start
SMALL_BYTES = 1 << 26
# documents and ids of the two splits, and the sum of the documents' hashes
_HEADER = struct.Struct("<QQQQ32s")
_SIZE = struct.Struct("<Q")


@dataclass
class Encoded:
    """A chunk's ids and documents per split."""

    ids: dict[str, np.ndarray]
    documents: dict[str, int]
    # the sum of the documents' SHA-256 modulo 2^256: the same for the same documents in any order, and easy to resume
    digest: int


def validates(digest: bytes, val_fraction: float) -> bool:
    """Whether a document with this SHA-256 is in the validation split, wherever it stands in the corpus."""
    return int.from_bytes(digest[:8], "big") < int(val_fraction * 2**64)


def encode(documents: Sequence[bytes], tokenizer: tokenizers.Tokenizer, val_fraction: float) -> Encoded:
    """Every document's ids and the end of text, in order, in the split that its hash says."""
    texts: dict[str, list[bytes]] = {split: [] for split in shards.SPLITS}
    total = 0
    for document in documents:
        digest = hashlib.sha256(document).digest()
        texts["val" if validates(digest, val_fraction) else "train"].append(document)
        total += int.from_bytes(digest, "big")
    dtype = shards.dtype_for(tokenizer.vocab_size)
    return Encoded(
        {split: tokenizer.encode_documents(found).astype(dtype) for split, found in texts.items()},
        {split: len(found) for split, found in texts.items()},
        total % (1 << 256),
    )


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """What another process does: chunks from stdin, ids to stdout, until stdin ends."""
    # Ctrl-C reaches the whole group; the process that was asked to stop closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = json.loads(sys.argv[1])
    tokenizer = tokenizers.named(given["tokenizer"], Path(given["directory"]))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            (count,) = _SIZE.unpack(_read(requests, _SIZE.size))
            sizes = struct.unpack(f"<{count}Q", _read(requests, 8 * count))
            encoded = encode([_read(requests, size) for size in sizes], tokenizer, given["val_fraction"])
            numbers = [encoded.documents[split] for split in shards.SPLITS]
            numbers += [len(encoded.ids[split]) for split in shards.SPLITS]
            answers.write(_HEADER.pack(*numbers, encoded.digest.to_bytes(32, "big")))
            for split in shards.SPLITS:
                answers.write(encoded.ids[split].data)
            answers.flush()


class _Process:
    """Another process that encodes."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spheret.data.workers", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __call__(self, documents: Sequence[bytes], dtype: np.dtype[Any]) -> Encoded:
        """Send a chunk and wait for its ids."""
        try:
            self._requests.write(_SIZE.pack(len(documents)))
            self._requests.write(struct.pack(f"<{len(documents)}Q", *map(len, documents)))
            for document in documents:
                self._requests.write(document)
            self._requests.flush()
            train, val, *lengths, digest = _HEADER.unpack(_read(self._answers, _HEADER.size))
            ids = [np.frombuffer(_read(self._answers, n * dtype.itemsize), dtype=dtype) for n in lengths]
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(
                f"a worker process ended with code {self._process.wait()} (out of memory?): run the same command "
                f"again to go on, with fewer --workers if it happens again."
            ) from error
        splits = shards.SPLITS
        return Encoded(
            dict(zip(splits, ids, strict=True)),
            dict(zip(splits, (train, val), strict=True)),
            int.from_bytes(digest, "big"),
        )

    def stop(self) -> None:
        """End it: it holds nothing that is not held here."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            # what was still to be written to a dead process
            with contextlib.suppress(OSError):
                pipe.close()


class Team:
    """The processes that encode a corpus: none for a small one."""

    def __init__(self, directory: Path, val_fraction: float, workers: int, corpus_bytes: int | None) -> None:
        self._directory, self._val_fraction = directory, val_fraction
        small = corpus_bytes is not None and corpus_bytes < SMALL_BYTES
        self._size = 0 if small or workers == 1 else workers
        self._processes: list[_Process] = []

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        while self._processes:
            self._processes.pop().stop()

    def start(self, tokenizer: str) -> None:
        """Start the processes, which load the tokenizer of this name while this one does other things."""
        given = {"tokenizer": tokenizer, "directory": str(self._directory), "val_fraction": self._val_fraction}
        # bytes are copied faster than they are sent
        if tokenizer != "bytes":
            self._processes = [_Process(given) for _ in range(self._size)]

    def encode(self, chunks: Iterable[Chunk], tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[Chunk, Encoded]]:
        """Every chunk and what it became, in order."""
        if not self._processes:
            for chunk in chunks:
                yield chunk, encode(chunk.documents, tokenizer, self._val_fraction)
        else:
            yield from self._encode_beside(chunks, shards.dtype_for(tokenizer.vocab_size))

    def _encode_beside(self, chunks: Iterable[Chunk], dtype: np.dtype[Any]) -> Iterator[tuple[Chunk, Encoded]]:
        """The same by other processes, with a bounded size under way."""
        idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            idle.put(process)

        # a thread here only waits for a pipe
        def work(documents: Sequence[bytes]) -> Encoded:
            process = idle.get()
            try:
                return process(documents, dtype)
            finally:
                idle.put(process)

        pool = ThreadPoolExecutor(len(self._processes), thread_name_prefix="spheret-prepare")
        flying: deque[tuple[Chunk, Future[Encoded]]] = deque()
        held = 0
        try:
            for chunk in chunks:
                flying.append((chunk, pool.submit(work, chunk.documents)))
                held += chunk.size
                while len(flying) > 4 * len(self._processes) or (held > FLIGHT_BYTES and len(flying) > 1):
                    first, future = flying.popleft()
                    yield first, future.result()
                    held -= first.size
            for first, future in flying:
                yield first, future.result()
        finally:
            # threads that wait for a process end with it
            self.__exit__()
            pool.shutdown(wait=True, cancel_futures=True)


if __name__ == "__main__":
    serve()
