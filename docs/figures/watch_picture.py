"""Take the pictures of a watched training that README and docs/watch.md show: a small Llama that meets a bad batch.

python docs/figures/watch_picture.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from screenshots import take

import spheret

SIZE = 1280, 660
STEPS, EVERY, BAD = 150, 10, 120


def train(page: Path) -> None:
    from watched_training import Chain, llama, loss_of

    model, chain = llama(0), Chain(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch = spheret.watch(model, EVERY)
    for step in range(1, STEPS + 1):
        loss = loss_of(model, chain.noise() if step == BAD else chain.batch())
        loss.backward()
        watch.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    watch.page(page)
    watch.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "watch.html"
        train(page)
        take(page, {"watch": SIZE}, folder)


if __name__ == "__main__":
    main()
