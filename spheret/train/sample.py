"""`spheret sample`: what a run would say."""

from __future__ import annotations

import torch

from spheret.runs.run import open_run


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
) -> int:
    """Print text that the model of a run continues a prompt with.

    Args:
        run: the run directory.
        prompt: what the text begins with; without one, a document's beginning.
        tokens: how many to add.
        temperature: 0 takes the likeliest token each time.
        top_k: choose among so many of the likeliest.
        top_p: choose among the likeliest that hold this much of the probability.
        seed: of the choices.
        count: how many texts.
        step: the step of the checkpoint; by default the newest.
    """
    if count < 1:
        raise ValueError(f"--count must be at least 1, got {count}.")
    if tokens < 0:
        raise ValueError(f"--tokens must be at least 0, got {tokens}.")
    if not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"--seed must fit in 64 bits, got {seed}.")
    opened = open_run(run)
    tokenizer = opened.tokenizer()
    model = opened.model(step)
    start = tokenizer.encode(prompt) if prompt else [tokenizer.end_of_text]
    ids = torch.tensor([[int(i) for i in start]] * count)
    known = tokenizer.vocab_size
    made = model.generate(ids, tokens, temperature, top_k, top_p, seed, vocab=known)
    for row in made.tolist():
        print(tokenizer.decode(row if prompt else row[1:]))
    return 0
