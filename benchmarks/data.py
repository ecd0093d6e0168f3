"""Time prepare and the loader against the usual ways, in turns.

python benchmarks/data.py --gigabytes 4
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from measuring import Comparison, run, write

from spheret.data.corpora import resolve
from spheret.data.loader import Loader
from spheret.data.manifest import MANIFESTS
from spheret.data.preparation import prepare
from spheret.data.readers import Document
from spheret.data.shards import COUNTS, MANIFEST, SplitWriter, dtype_for, scan
from spheret.data.store import Data, open_data
from spheret.data.tokenizers import GPT2Tokenizer
from spheret.support.cache import cache_directory
from spheret.support.files import check_output_file
from spheret.support.ranges import check_above_zero, check_counts

# the windows of an update in the paper's runs
_UPDATE_WINDOWS = 128
# random ids are written in parts of this many
_RANDOM_IDS = 1 << 22
# the tokens per window and the windows per batch of the loader
BLOCK, BATCH = 1024, 12
TITLE = "prepare sotu with gpt2, against encode_ordinary"
SHORT = ("--repeats", "1", "--batches", "200", "--gigabytes", "0.1")


def plain_prepare() -> np.ndarray:
    """Encode sotu in one process: tiktoken's encode_ordinary per document, and one numpy concatenation at the end."""
    encoding = GPT2Tokenizer().encoding
    parts = []
    for document in resolve("sotu").read(None):
        ids = encoding.encode_ordinary(_text(document))
        ids.append(encoding.eot_token)
        parts.append(np.array(ids, dtype=np.uint16))
    return np.concatenate(parts)


def _text(document: Document) -> str:
    return document.decode() if isinstance(document, bytes) else document


def plain_batch(path: Path, block: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Load a batch as nanoGPT does: a new memory map per batch, random places, and one tensor per row."""
    data = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block, (batch_size,)).tolist()

    def rows(shift: int) -> torch.Tensor:
        windows = (data[start + shift : start + shift + block] for start in starts)
        return torch.stack([torch.from_numpy(window.astype(np.int64)) for window in windows])

    return rows(0), rows(1)


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _compare(plain: Callable[[], Any], ours: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the median seconds of two ways that take turns, and the median ratio of a turn."""
    turns = [(_seconds(plain), _seconds(ours)) for _ in range(repeats)]
    return {
        "plain_seconds": statistics.median(turn[0] for turn in turns),
        "spheret_seconds": statistics.median(turn[1] for turn in turns),
        "ratio": statistics.median(turn[0] / turn[1] for turn in turns),
    }


def _rates(timing: dict[str, float], tokens: int) -> dict[str, float]:
    return {
        **timing,
        "tokens": tokens,
        "plain_tokens_per_second": tokens / timing["plain_seconds"],
        "spheret_tokens_per_second": tokens / timing["spheret_seconds"],
    }


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bench_prepare(repeats: int, folder: Path) -> tuple[Data, dict[str, float]]:
    """Time prepare on sotu against `plain_prepare`."""
    number = iter(range(repeats + 1))
    data = prepare("sotu", "gpt2", folder / str(next(number)))
    tokens = data.tokens("train") + data.tokens("val")
    timing = _compare(plain_prepare, lambda: prepare("sotu", "gpt2", folder / str(next(number))), repeats)
    return data, _rates(timing, tokens)


def _drain(loader: Loader, batches: int) -> None:
    for _ in loader.batches(stop=batches):
        pass


def _bench_loader(data: Data, repeats: int, batches: int) -> dict[str, float]:
    """Time the loader against `plain_batch`."""
    loader = data.loader(BLOCK, BATCH)
    path = data.path / data.manifest.shards["train"][0].name

    def plain() -> None:
        for _ in range(batches):
            plain_batch(path, BLOCK, BATCH)

    timing = _compare(plain, lambda: _drain(loader, batches), repeats)
    return {
        **timing,
        "block": BLOCK,
        "batch_size": BATCH,
        "plain_batches_per_second": batches / timing["plain_seconds"],
        "spheret_batches_per_second": batches / timing["spheret_seconds"],
    }


def _bench_memory(data: Data, batches: int) -> dict[str, float]:
    """Measure resident memory after a tenth of the batches, and its largest growth in the rest."""
    loader = data.loader(BLOCK, BATCH)
    first = most = 0
    for number, _ in enumerate(loader.batches(stop=batches)):
        if number % 100 == 0:
            now = resident_bytes()
            first = now if number == batches // 10 else first
            most = max(most, now) if first else 0
    return {"batches": batches, "resident_bytes": first, "grown_bytes": most - first}


def _random_data(like: Data, path: Path, gigabytes: float) -> Data:
    """Write random ids as a data directory that is else like another one."""
    path.mkdir()
    dtype, vocab_size = dtype_for(like.vocab_size), like.vocab_size
    writer, left = (
        SplitWriter(path, "train", dtype, like.manifest.shard_tokens),
        int(gigabytes * 1e9 / dtype.itemsize),
    )
    random = np.random.default_rng(0)
    while left:
        size = min(left, _RANDOM_IDS)
        writer.append(random.integers(vocab_size, size=size, dtype=dtype.type))
        left -= size
    writer.finish()
    shards = [scan(path / name, dtype, vocab_size)[1] for name in writer.names]
    for name in (COUNTS, *(shard.name for shard in like.manifest.shards["val"])):
        (path / name).write_bytes((like.path / name).read_bytes())
    everything = {**like.manifest.shards, "train": shards}
    manifest = msgspec.structs.replace(
        like.manifest,
        shards=everything,
        tokens={**like.manifest.tokens, "train": writer.tokens},
        largest_id=max(shard.largest_id for records in everything.values() for shard in records),
    )
    MANIFESTS.write(path / MANIFEST, manifest)
    return open_data(path)


def _forget(data: Data) -> None:
    """Let the system drop the shards from its cache of files, if it can."""
    if hasattr(os, "posix_fadvise"):
        for shard in data.manifest.shards["train"]:
            with (data.path / shard.name).open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bench_start(data: Data, repeats: int) -> dict[str, float]:
    """Time the first batch of newly opened data, which checks hashes, against the same batch once they are checked.

    Files that the system has in its memory are "warm", others "cold".
    """
    times: dict[str, list[float]] = {}
    for seed in range(repeats):
        for state in ("warm", "cold"):
            loader = open_data(data.path).loader(BLOCK, _UPDATE_WINDOWS, seed)
            for name in ("checked", "again"):
                if state == "cold":
                    _forget(data)
                seconds = _seconds(partial(loader.batch, 0))
                times.setdefault(f"{state}_{name}_seconds", []).append(seconds)
                # every second batch the loader releases its pages, and only then can the system drop them
                loader.batch(0)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {"gigabytes": 2e-9 * data.tokens(), "windows": _UPDATE_WINDOWS, "block": BLOCK, **medians}


def main(
    repeats: int = 9,
    batches: int = 1000,
    gigabytes: float = 1.0,
    json: Path | None = None,
) -> None:
    """Time prepare with gpt2 and the loader against the usual ways, and the check of hashes at the start of a run.

    Args:
        repeats: the number of turns per comparison.
        batches: the batches per turn; memory is watched over ten times as many.
        gigabytes: the size of the random data whose first batch is timed with and without the check of its hashes.
        json: also write the numbers to this file.
    """
    check_counts(repeats=repeats, batches=batches)
    check_above_zero("--gigabytes", gigabytes, most=1e4)
    check_output_file("--json", json)
    torch.manual_seed(0)
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        data, prepared = _bench_prepare(repeats, Path(folder))
        result: dict[str, dict[str, Any]] = {
            "prepare": prepared,
            "loader": _bench_loader(data, repeats, batches),
            "memory": _bench_memory(data, 10 * batches),
            "start": _bench_start(_random_data(data, Path(folder) / "random", gigabytes), repeats),
        }
    row = result["prepare"]
    print(
        f"{TITLE}: {row['spheret_tokens_per_second']:,.0f} tokens/s, "
        f"{row['ratio']:.2f}x the plain {row['plain_tokens_per_second']:,.0f}"
    )
    loaded, memory = result["loader"], result["memory"]
    print(
        f"loader, {BATCH} x {BLOCK}: {loaded['spheret_batches_per_second']:,.0f} batches/s, "
        f"{loaded['ratio']:.2f}x the plain {loaded['plain_batches_per_second']:,.0f}"
    )
    print(
        f"memory over {memory['batches']:,} batches: {memory['resident_bytes'] / 2**20:,.1f} MiB, "
        f"grown by {memory['grown_bytes'] / 2**20:,.2f} MiB"
    )
    start = result["start"]
    for state in ("warm", "cold"):
        print(
            f"first batch of {start['windows']} windows from {start['gigabytes']:.3g} GB, {state}: "
            f"{start[f'{state}_checked_seconds']:.3f} s, once checked {start[f'{state}_again_seconds']:.3f} s"
        )
    write(json, result)


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """Everything that has a plain way."""
    rows = {"loader": f"load batches of {BATCH} x {BLOCK}, against nanoGPT's loader", "prepare": TITLE}
    return [
        Comparison(title, result[key]["spheret_seconds"], result[key]["plain_seconds"]) for key, title in rows.items()
    ]


if __name__ == "__main__":
    run(main)
