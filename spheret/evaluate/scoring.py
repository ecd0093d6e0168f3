"""Log-likelihoods of many continuations at once, every shared prefix computed once.

Requests are packed into rows that are trees: a token sees its ancestors alone and stands at its depth, so a question
with four answers costs its tokens once and each answer's once. The head runs only where something is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spheret.model.gpt import GPT
from spheret.model.loss import ROWS

# what a batch may hold, padding included, where nobody says how many requests it shall
AUTO_TOKENS = {"cpu": 2048, "cuda": 32768}
# from this part of that on, a row below this part of the longest goes into the next batch
ENOUGH, EVEN = 1 / 16, 0.8
# two requests share a row if at least this part of the second is what the first begins with
SHARED = 0.25


@dataclass(frozen=True)
class Request:
    """Tokens and how many of them, at the end, are to be scored given all before them."""

    tokens: tuple[int, ...]
    scored: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the model reads: all but the last."""
        return self.tokens[:-1]


def request(context: Sequence[int], continuation: Sequence[int], block: int) -> tuple[Request, bool]:
    """The request for a continuation after a context, and whether its context had to be cut on the left."""
    if not context or not continuation:
        raise ValueError("a request needs at least one token of context and one to score, and this text gives none.")
    if len(continuation) > block:
        raise ValueError(f"a continuation of {len(continuation)} tokens does not fit the context of {block}.")
    tokens = (*context, *continuation)
    return Request(tokens[-(block + 1) :], len(continuation)), len(tokens) > block + 1


@dataclass
class Row:
    """A tree of tokens in the order of a walk: each branch is where it starts and the nodes it hangs from."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branches: list[tuple[int, list[int]]] = field(default_factory=list)
    # request number, and the nodes after which its tokens are scored
    requests: list[tuple[int, list[int]]] = field(default_factory=list)

    def add(self, number: int, request: Request, path: list[int]) -> list[int]:
        """Hang a request from the path that it shares with the last one; its own path from the root."""
        new = request.inputs[len(path) :]
        start = len(self.tokens)
        if new:
            self.branches.append((start, path))
            self.tokens += new
            self.positions += range(len(path), len(request.inputs))
        whole = path + list(range(start, start + len(new)))
        self.requests.append((number, whole[-request.scored :]))
        return whole

    def mask(self, size: int) -> Tensor:
        """What each token sees, (size, size): itself and its ancestors; padding sees itself."""
        seen = torch.eye(size, dtype=torch.bool)
        ends = [start for start, _ in self.branches[1:]] + [len(self.tokens)]
        for (start, path), end in zip(self.branches, ends, strict=True):
            seen[start:end, path] = True
            seen[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        return seen


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def pack(requests: Sequence[Request], block: int) -> list[Row]:
    """Rows of at most `block` tokens that hold every request; neighbours in dictionary order share what they can."""
    rows: list[Row] = []
    path: list[int] = []
    last: tuple[int, ...] = ()
    for number in sorted(range(len(requests)), key=lambda i: requests[i].inputs):
        inputs = requests[number].inputs
        shared = _common(last, inputs)
        fits = bool(rows) and len(rows[-1].tokens) + len(inputs) - shared <= block
        if not fits or shared < SHARED * len(inputs):
            rows.append(Row())
            shared = 0
        path = rows[-1].add(number, requests[number], path[:shared])
        last = inputs
    return rows


def batches(rows: Sequence[Row], size: int | None, tokens: int) -> Iterator[list[Row]]:
    """Rows of like length together, longest first: up to `size` requests, or up to `tokens` with padding."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.tokens), reverse=True):
        longest = len(batch[0].tokens) if batch else 0
        if size is None:
            full = longest * (len(batch) + 1) > tokens
        else:
            full = sum(len(r.requests) for r in [*batch, row]) > size
        # padding is work for nothing, once there is enough of a batch
        uneven = longest * len(batch) >= ENOUGH * tokens and len(row.tokens) < EVEN * longest
        if batch and (full or uneven):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.no_grad()
def _score(model: GPT, rows: Sequence[Row], requests: Sequence[Request]) -> list[tuple[int, float, bool]]:
    """Request number, summed log-likelihood and whether every token was the likeliest, for one batch."""
    device = model.tokens.weight.device
    size = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), size, dtype=torch.long)
    positions = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        positions[index, : len(row.tokens)] = torch.tensor(row.positions)
    if all(len(row.branches) == 1 for row in rows):
        h = model.stream(tokens.to(device))
    else:
        mask = torch.stack([row.mask(size) for row in rows])[:, None]
        h = model.stream(tokens.to(device), positions=positions.to(device), mask=mask.to(device))
    asked = [(index, number, nodes) for index, row in enumerate(rows) for number, nodes in row.requests]
    where = torch.tensor([index * size + node for index, _, nodes in asked for node in nodes], device=device)
    targets = torch.tensor([t for _, number, nodes in asked for t in requests[number].tokens[-len(nodes) :]]).to(
        device
    )
    parts = []
    for at, target in zip(where.split(ROWS), targets.split(ROWS), strict=True):
        logits = model.logits(h.flatten(0, 1)[at])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = logits.gather(-1, target[:, None]).squeeze(-1) - logits.logsumexp(-1)
        parts.append(torch.stack([chosen.double(), (logits.argmax(-1) == target).double()]))
    scores, greedy = torch.cat(parts, 1).cpu()
    lengths = [len(nodes) for _, _, nodes in asked]
    return [
        (number, float(s.sum()), bool(g.all()))
        for (_, number, _), s, g in zip(asked, scores.split(lengths), greedy.split(lengths), strict=True)
    ]


def score(
    model: GPT,
    requests: Sequence[Request],
    batch_size: int | None = None,
    tick: Callable[[int], object] = lambda n: None,
) -> list[tuple[float, bool]]:
    """For every request the log-likelihood of its continuation, and whether greedy decoding would say it.

    batch_size: requests in a batch, None for as many as fit a budget of tokens; a shared row is never cut.
    tick: called with the number of requests done after each batch.
    """
    found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
    rows = pack(requests, model.config.block)
    for batch in batches(rows, batch_size, AUTO_TOKENS.get(model.tokens.weight.device.type, 2048)):
        scored = _score(model, batch, requests)
        for number, value, greedy in scored:
            found[number] = (value, greedy)
        tick(len(scored))
    return found
