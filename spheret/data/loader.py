"""Windows of token ids. A formula gives the windows of each step, so there is no state to save or to replay."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import mmap
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spheret.data.manifest import MIB, ShardRecord, check_ids
from spheret.data.shards import check_hash

Batch = tuple[torch.Tensor, torch.Tensor]

# the pages that windows touched are released after this many windows; the kernel still caches the files
_WINDOWS_HELD = 256
# shuffled indices are computed in blocks of this many
_INDEX_BLOCK = 4096
_ROUNDS = 4


class Stream:
    """The ids of several shards as one memory-mapped ring. Resident memory stays bounded.

    records: per shard the hashes that its bytes must have. A MiB is checked when a window of it is first read. So
    opening costs nothing, the first batch costs the same for any amount of data, and no id of a damaged MiB is ever
    returned.
    """

    def __init__(
        self, paths: Sequence[Path], dtype: np.dtype[Any], vocab_size: int, records: Sequence[ShardRecord]
    ) -> None:
        self._vocab_size = vocab_size
        self._paths = paths
        # per shard its hashes, one after the other, and which of them were checked
        self._hashes = [record.sha256_per_mib for record in records]
        self._checked = [bytearray(len(hashes) // 64) for hashes in self._hashes]
        self._maps: list[mmap.mmap] = []
        self._arrays: list[np.ndarray] = []
        for path, record in zip(paths, records, strict=True):
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps.append(mapped)
            self._arrays.append(np.frombuffer(mapped, dtype=dtype, count=record.tokens))
        # where each shard ends in the ring
        self._ends = np.cumsum([len(array) for array in self._arrays], dtype=np.int64).tolist()
        self._windows_read = 0

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _ids(self, index: int, first: int, last: int) -> np.ndarray:
        """Return ids of a shard, after a check of the bytes around them when these are first used."""
        ids, checked = self._arrays[index][first:last], self._checked[index]
        begin = first * ids.itemsize
        for number in range(begin // MIB, -(-(begin + ids.nbytes) // MIB)):
            if not checked[number]:
                self._check(index, number)
                checked[number] = True
        return ids

    def _check(self, index: int, number: int) -> None:
        """Raise unless a MiB of a shard has its hash."""
        start = number * MIB
        part = memoryview(self._maps[index])[start : start + MIB]
        expected = self._hashes[index][64 * number : 64 * number + 64]
        where = f" in bytes {start:,} to {start + len(part) - 1:,}"
        check_hash(self._paths[index], hashlib.sha256(part).hexdigest(), expected, where)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._maps[index].madvise(mmap.MADV_DONTNEED, start, len(part))

    def window(self, start: int, length: int) -> np.ndarray:
        """Return `length` ids from `start` on, across shard ends and from the last id to the first: (length,)."""
        parts: list[np.ndarray] = []
        while length:
            start %= len(self)
            index = bisect.bisect_right(self._ends, start)
            first = start - (self._ends[index] - len(self._arrays[index]))
            parts.append(self._ids(index, first, first + length))
            start, length = self._ends[index], length - len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def batch(self, starts: Sequence[int], block: int) -> Batch:
        """Return the windows at `starts`, and their targets one id later: two of (len(starts), block) int64."""
        x = torch.empty((len(starts), block), dtype=torch.int64)
        y = torch.empty_like(x)
        inputs, targets = x.numpy(), y.numpy()
        for row, start in enumerate(starts):
            window = self.window(start, block + 1)
            inputs[row] = window[:-1]
            targets[row] = window[1:]
        largest = max(int(targets.max()), int(inputs[:, 0].max())) if len(starts) else 0
        check_ids("the data", largest, self._vocab_size)
        self._windows_read += len(starts)
        if self._windows_read >= _WINDOWS_HELD:
            self._windows_read = 0
            self.release()
        return x, y

    def release(self) -> None:
        """Release resident pages. The kernel still caches the files."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)

    def positions(self, token: int) -> np.ndarray:
        """Return every position of an id in ascending order: int64."""
        positions = [
            np.flatnonzero(self._ids(index, 0, len(array)) == token) + end - len(array)
            for index, (end, array) in enumerate(zip(self._ends, self._arrays, strict=True))
        ]
        self.release()
        return np.concatenate(positions) if positions else np.zeros(0, dtype=np.int64)


def _mix(value: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finalizer, a bijection of 64 bits in which every output bit depends on every input bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _key(*words: int) -> int:
    """Return 64 bits that depend on every word."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15) + np.uint64(word & (1 << 64) - 1))
    return int(state[0])


def shuffled(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Apply a random permutation of range(size) to some indices.

    The permutation is a Feistel network, so each index costs O(1) and no table is stored.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [np.uint64(_key(seed, epoch, turn)) for turn in range(_ROUNDS)]
    values = indices.astype(np.uint64)
    pending = np.ones(len(values), dtype=bool)
    # the network permutes a power of four; values that leave the range pass through it again until they are back
    while pending.any():
        left, right = values[pending] >> bits, values[pending] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        values[pending] = left << bits | right
        pending = values >= size
    return values.astype(np.int64)


class Loader:
    """Training windows. Every epoch visits each window once, in a new order and from a new offset.

    `batch_size` counts the windows per process and micro-batch. An update takes n = `windows_per_update` windows,
    which is batch_size * world_size * accumulation: step s takes windows s * n to (s + 1) * n of the order. These
    windows do not depend on how ranks and micro-batches share them. `Data.loader` makes one.
    """

    def __init__(
        self, stream: Stream, block: int, batch_size: int, seed: int, rank: int, world_size: int, accumulation: int
    ) -> None:
        if batch_size < 1 or world_size < 1 or accumulation < 1:
            raise ValueError(
                f"batch_size, world_size and accumulation must be at least 1, got {batch_size}, {world_size} and "
                f"{accumulation}."
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be 0 to {world_size - 1} (world_size - 1), got {rank}.")
        self.block, self.batch_size, self.seed = block, batch_size, seed
        self.rank, self.world_size, self.accumulation = rank, world_size, accumulation
        self.windows_per_update = batch_size * world_size * accumulation
        self._stream = stream
        # the last window of the ring may run on into the first
        self.windows_per_epoch = len(stream) // block
        self._order = lru_cache(maxsize=4)(self._order_block)

    def _order_block(self, epoch: int, number: int) -> np.ndarray:
        first = number * _INDEX_BLOCK
        indices = np.arange(first, min(first + _INDEX_BLOCK, self.windows_per_epoch))
        offset = _key(self.seed, epoch, _ROUNDS) % len(self._stream)
        return shuffled(indices, self.windows_per_epoch, self.seed, epoch) * self.block + offset

    def starts(self, step: int) -> np.ndarray:
        """Return where the windows of a step begin, over all ranks and micro-batches: (windows_per_update,) int64."""
        if step < 0:
            raise ValueError(f"step counts from 0, got {step}.")
        first, last = step * self.windows_per_update, (step + 1) * self.windows_per_update
        parts = []
        while first < last:
            epoch, index = divmod(first, self.windows_per_epoch)
            number, inside = divmod(index, _INDEX_BLOCK)
            parts.append(self._order(epoch, number)[inside : inside + last - first])
            first += len(parts[-1])
        return np.concatenate(parts) % len(self._stream)

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Return this rank's micro-batch number `micro` of a step: x and y, each (batch_size, block) int64."""
        if not 0 <= micro < self.accumulation:
            raise ValueError(f"micro must be 0 to {self.accumulation - 1} (accumulation - 1), got {micro}.")
        first = (micro * self.world_size + self.rank) * self.batch_size
        return self._stream.batch(self.starts(step)[first : first + self.batch_size].tolist(), self.block)

    def batches(self, start: int = 0, stop: int | None = None, ahead: int = 4) -> Generator[Batch]:
        """Yield every micro-batch of steps `start` to `stop`. A background thread keeps `ahead` of them ready."""
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=max(1, ahead))
        closed = threading.Event()

        def put(item: Batch | BaseException | None) -> None:
            while not closed.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.1)
                    return

        def work() -> None:
            step = start
            try:
                while not closed.is_set() and (stop is None or step < stop):
                    for micro in range(self.accumulation):
                        put(self.batch(step, micro))
                    step += 1
                put(None)
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=work, name="spheret-loader", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            thread.join()


class Validation:
    """Fixed windows of a split in order. Every target comes with the number of its document."""

    def __init__(self, stream: Stream, block: int, batch_size: int, windows: int | None, end_of_text: int) -> None:
        if batch_size < 1 or (windows is not None and windows < 1):
            raise ValueError(f"batch_size and windows must be at least 1, got {batch_size} and {windows}.")
        self.block, self.batch_size = block, batch_size
        self._stream = stream
        available = (len(stream) - 1) // block
        count = available if windows is None else min(windows, available)
        # evenly spread, so that a few windows still cover the whole split
        self.starts = np.arange(count) * available // count * block
        self._ends = stream.positions(end_of_text)

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.starts) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield x, y and documents, each (at most batch_size, block) int64.

        documents[i, j] is the number of the document that contains y[i, j].
        """
        for first in range(0, len(self.starts), self.batch_size):
            starts = self.starts[first : first + self.batch_size]
            x, y = self._stream.batch(starts.tolist(), self.block)
            targets = starts[:, None] + np.arange(1, self.block + 1)
            yield x, y, torch.from_numpy(np.searchsorted(self._ends, targets).astype(np.int64))
