"""Text from the model of a run: `spheret sample`, and the short text that every training ends with."""

from __future__ import annotations

from pathlib import Path

import torch

from spheret.data import Tokenizer
from spheret.model.gpt import GPT
from spheret.runs.cost import check_generating
from spheret.runs.layout import SAMPLE
from spheret.runs.records import RUN_SAMPLES, RunSample
from spheret.runs.run import open_run
from spheret.support.machine import resolve_device
from spheret.support.ranges import check_counts

# of the text that a training ends with, at most
TOKENS = 128
TEMPERATURE, SEED = 0.8, 1337


def write_ending_sample(path: Path, model: GPT, tokenizer: Tokenizer, step: int) -> None:
    """Write sample.json: a text of at most one block that begins a new document. No random state of torch changes."""
    tokens = min(TOKENS, model.config.block)
    start = torch.tensor([[tokenizer.end_of_text]], device=model.tokens.weight.device)
    ids = model.generate(start, tokens, TEMPERATURE, seed=SEED, vocab=tokenizer.vocab_size)[0, 1:].tolist()
    RUN_SAMPLES.write(path / SAMPLE, RunSample(tokenizer.decode(ids), "", SEED, TEMPERATURE, tokens, step))


def sample(
    run: str,
    /,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1337,
    count: int = 1,
    step: int | None = None,
    device: str | None = None,
) -> int:
    """Continue a prompt with the model of a run, and print the text.

    Args:
        run: The run directory.
        prompt: The beginning of the text. Without a prompt the text begins a new document.
        tokens: Tokens to add.
        temperature: Softmax temperature; 0 always takes the likeliest token.
        top_k: Choose among this many of the likeliest tokens.
        top_p: Choose among the likeliest tokens that together hold this share of the probability.
        seed: Seed of the choices.
        count: Number of texts.
        step: Step of the checkpoint; by default the newest.
        device: cuda, mps or cpu; by default the first of these that this machine has.
    """
    check_counts(count=count, top_k=top_k)
    check_counts(0, tokens=tokens, step=step)
    if not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"--seed must fit in 64 bits, got {seed}.")
    opened = open_run(run)
    tokenizer = opened.tokenizer()
    place = resolve_device(device)
    start = tokenizer.encode(prompt) if prompt else [tokenizer.end_of_text]
    check_generating(opened.model_config, count, len(start) + tokens, place)
    model = opened.model(step, place)
    ids = torch.tensor([[int(i) for i in start]] * count, device=place)
    texts = model.generate(ids, tokens, temperature, top_k, top_p, seed, vocab=tokenizer.vocab_size)
    for row in texts.tolist():
        print(tokenizer.decode(row if prompt else row[1:]))
    return 0
