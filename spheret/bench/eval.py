"""`spheret bench eval`: multiple-choice requests against lm_eval's own `hf` model, in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spheret.bench.timing import interleaved
from spheret.data.corpora import resolve
from spheret.data.tokenizers import GPT2Tokenizer, describe
from spheret.model.gpt import GPT, PRESETS, GPTConfig
from spheret.support.allocator import keep_freed_memory
from spheret.support.errors import need, unknown
from spheret.support.machine import write_measurement

# what a task's requests are like: words of the question, words of an answer, answers to a question
SHAPES = {"hellaswag": (64, 18, 4), "arc_easy": (24, 4, 4), "piqa": (10, 18, 2)}
RIVAL = "lm_eval hf"


def questions(shape: tuple[int, int, int], count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs of context and continuation from presidential addresses, all answers to a question in a row."""
    document = next(iter(resolve("sotu").read(None)))
    words = (document.decode() if isinstance(document, bytes) else document).split()
    before, after, choices = shape
    draw = random.Random(seed)

    def piece(length: int) -> str:
        # real tasks are not all of one length
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
    wrapped = need("lm_eval.models.huggingface", "eval").HFLM
    return wrapped(pretrained=to_gpt2(model), tokenizer=tokenizer, batch_size=batch_size, device="cpu")


def bench_eval(
    size: str = "S", count: int = 16, batch_size: int = 16, repeats: int = 5, json: Path | None = None
) -> int:
    """Requests per second of log-likelihoods on questions shaped like three tasks, interleaved, medians.

    Args:
        size: S, M or L.
        count: questions of each shape.
        batch_size: requests in a batch, for both.
        repeats: rounds; the median is printed.
        json: also write the table here.
    """
    import tempfile

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from spheret.evaluate.lm import SpheretLM
    from spheret.support.cache import cache_directory

    if size not in PRESETS:
        raise unknown("size", size, PRESETS)
    keep_freed_memory()
    torch.manual_seed(0)
    model = GPT(GPTConfig.preset(size, scheme="pre-ln", activation="gelu_tanh")).eval()
    ours = SpheretLM(model=model, tokenizer=GPT2Tokenizer(), batch_size=batch_size, device="cpu")
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        rival = _rival(model, batch_size, Path(folder))
    instance = need("lm_eval.api.instance", "eval").Instance
    table = []
    console = Console()
    with Progress(console=console, transient=True) as bar:
        rounds = bar.add_task("evaluating", total=len(SHAPES) * 2 * (repeats + 2))
        for shape, sizes in SHAPES.items():
            asked = [
                instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
                for i, pair in enumerate(questions(sizes, count))
            ]
            runs: dict[str, Callable[[], object]] = {
                name: partial(lm.loglikelihood, asked, disable_tqdm=True)
                for name, lm in (("spheret", ours), (RIVAL, rival))
            }
            took = interleaved(runs, repeats, lambda: bar.advance(rounds))
            table.append(
                {
                    "shape": shape,
                    "requests": len(asked),
                    **{f"{name} requests/s": len(asked) / seconds for name, seconds in took.items()},
                    "ratio": took[RIVAL] / took["spheret"],
                }
            )
    shown = Table(title=f"pre-ln {size}, batches of {batch_size} requests, {torch.get_num_threads()} threads")
    for column in ("shape", "requests", "spheret requests/s", f"{RIVAL} requests/s", "ratio"):
        shown.add_column(column, justify="left" if column == "shape" else "right")
    for row in table:
        rates = (f"{row[f'{name} requests/s']:.2f}" for name in ("spheret", RIVAL))
        shown.add_row(str(row["shape"]), str(row["requests"]), *rates, f"{row['ratio']:.2f}")
    console.print(shown)
    write_measurement(
        json, {"size": size, "count": count, "batch_size": batch_size, "repeats": repeats, "table": table}
    )
    return 0
