"""Encode chunks of documents in order: in this process if the corpus is small, otherwise in worker processes.

A worker is a fresh interpreter that is connected by pipes. Nothing is forked while threads run, nothing is pickled.
A worker imports numpy and the tokenizer, but not torch. It ends when this process ends.
Faster than the threads of `tiktoken.encode_ordinary_batch`: docs/data.md has the measurement.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from spheret.data import shards, tokenizers
from spheret.data.chunks import Chunk
from spheret.data.split import Split
from spheret.support.child import python_command, python_environment

# the documents that are sent to workers and not yet written, in bytes
FLIGHT_BYTES = 1 << 26
# a corpus below this size is encoded in less time than worker processes take to start
SMALL_BYTES = 1 << 26
COMMAND = python_command("-m", "spheret.data.workers")
# the header of an answer: documents and ids per split, and the sum of the documents' hashes
_HEADER = struct.Struct("<QQQQ32s")
_SIZE = struct.Struct("<Q")


@dataclass
class Encoded:
    """The ids and the number of documents of a chunk, per split."""

    ids: dict[str, np.ndarray]
    documents: dict[str, int]
    # the sum of the documents' SHA-256 modulo 2^256, which does not depend on their order
    digest: int


def encode(documents: Sequence[bytes], tokenizer: tokenizers.Tokenizer, split: Split) -> Encoded:
    """Return the ids of documents, or of their parts, in order in each split. The end of text follows each."""
    texts: dict[str, list[bytes]] = {name: [] for name in shards.SPLITS}
    total = 0
    for document in documents:
        digest = hashlib.sha256(document).digest()
        for name, part in split.parts(document, digest):
            texts[name].append(part)
        total += int.from_bytes(digest, "big")
    dtype = shards.dtype_for(tokenizer.vocab_size)
    return Encoded(
        {name: tokenizer.encode_documents(part).astype(dtype) for name, part in texts.items()},
        {name: len(part) for name, part in texts.items()},
        total % (1 << 256),
    )


def _read(stream: IO[bytes], size: int) -> bytes:
    """Read exactly `size` bytes, or raise EOFError."""
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """Run a worker: read chunks from stdin and write their ids to stdout, until stdin ends."""
    # Ctrl-C reaches all processes; the one that started this worker stops it by closing the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    tokenizer = tokenizers.named(settings["tokenizer"], Path(settings["directory"]))
    division = Split(settings["val_fraction"], settings["by_position"])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            (count,) = _SIZE.unpack(_read(requests, _SIZE.size))
            sizes = struct.unpack(f"<{count}Q", _read(requests, 8 * count))
            encoded = encode([_read(requests, size) for size in sizes], tokenizer, division)
            numbers = [encoded.documents[split] for split in shards.SPLITS]
            numbers += [len(encoded.ids[split]) for split in shards.SPLITS]
            answers.write(_HEADER.pack(*numbers, encoded.digest.to_bytes(32, "big")))
            for split in shards.SPLITS:
                answers.write(encoded.ids[split].data)
            answers.flush()


class _Worker:
    """A worker process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=python_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __call__(self, documents: Sequence[bytes], dtype: np.dtype[Any]) -> Encoded:
        """Send a chunk, and wait for its ids."""
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
        """End the process. It holds nothing that is not held here too."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            # closing flushes, which fails once the process has ended
            with contextlib.suppress(OSError):
                pipe.close()


class Team:
    """The worker processes of a preparation. A small corpus has none."""

    def __init__(self, directory: Path, split: Split, workers: int, corpus_bytes: int | None) -> None:
        self._directory, self._split = directory, split
        small = corpus_bytes is not None and corpus_bytes < SMALL_BYTES
        self._size = 0 if small or workers == 1 else workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        while self._workers:
            self._workers.pop().stop()

    def start(self, tokenizer: str) -> None:
        """Start the workers. They load the tokenizer of this name while this process goes on."""
        settings = {"tokenizer": tokenizer, "directory": str(self._directory), **asdict(self._split)}
        # copying bytes is faster than sending them to another process
        if tokenizer != "bytes":
            self._workers = [_Worker(settings) for _ in range(self._size)]

    def encode(self, chunks: Iterable[Chunk], tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield every chunk with its ids, in order."""
        if not self._workers:
            for chunk in chunks:
                yield chunk, encode(chunk.documents, tokenizer, self._split)
        else:
            yield from self._encode_by_workers(chunks, shards.dtype_for(tokenizer.vocab_size))

    def _encode_by_workers(self, chunks: Iterable[Chunk], dtype: np.dtype[Any]) -> Iterator[tuple[Chunk, Encoded]]:
        """Do the same with worker processes. At most FLIGHT_BYTES are under way."""
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        # these threads only wait for pipes
        def work(documents: Sequence[bytes]) -> Encoded:
            worker = idle.get()
            try:
                return worker(documents, dtype)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(len(self._workers), thread_name_prefix="spheret-prepare")
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        held = 0
        try:
            for chunk in chunks:
                pending.append((chunk, pool.submit(work, chunk.documents)))
                held += chunk.size
                while len(pending) > 4 * len(self._workers) or (held > FLIGHT_BYTES and len(pending) > 1):
                    first, future = pending.popleft()
                    yield first, future.result()
                    held -= first.size
            for first, future in pending:
                yield first, future.result()
        finally:
            # a thread that waits for a worker ends when the worker does
            self.__exit__()
            pool.shutdown(wait=True, cancel_futures=True)


if __name__ == "__main__":
    serve()
