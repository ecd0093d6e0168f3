"""Log-likelihoods of many continuations at once. Shared prefixes are computed once.

Requests are packed into rows. A row is a tree of tokens: a token attends to its ancestors only, and its position is
its depth in the tree. A question with four answers is computed once, not four times. The head runs only at the tokens
whose successor is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spheret.model.gpt import GPT
from spheret.model.loss import ROWS
from spheret.support.precision import wide

# the most tokens of a batch, padding included, if no batch size is given
AUTO_TOKENS = {"cpu": 2048, "cuda": 32768}
# a batch that already holds this share of the most tokens takes no row shorter than MIN_LENGTH of its longest row
MIN_FILL = 1 / 16
MIN_LENGTH = 0.8
# a request joins the row of the previous one if they share at least this fraction of its tokens as a prefix
MIN_SHARED = 0.25


@dataclass(frozen=True)
class Request:
    """Tokens, of which the last `scored` are scored, each given all tokens before it."""

    tokens: tuple[int, ...]
    scored: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """The tokens that the model reads: all but the last."""
        return self.tokens[:-1]


def request(context: Sequence[int], continuation: Sequence[int], block: int) -> tuple[Request, bool]:
    """The request for a continuation after a context, and whether the context was cut on the left to fit `block`."""
    if not context or not continuation:
        raise ValueError("a request needs at least one token of context and at least one token to score.")
    if len(continuation) > block:
        raise ValueError(f"a continuation of {len(continuation)} tokens does not fit the context of {block}.")
    tokens = (*context, *continuation)
    return Request(tokens[-(block + 1) :], len(continuation)), len(tokens) > block + 1


@dataclass
class Row:
    """A tree of tokens, stored branch after branch. A node is an index into `tokens`."""

    tokens: list[int] = field(default_factory=list)
    # the depth of each node
    positions: list[int] = field(default_factory=list)
    # per branch: its first node, and the path of nodes from the root to the node it is attached to
    branches: list[tuple[int, list[int]]] = field(default_factory=list)
    # per request: its number, and the nodes whose next tokens are scored
    requests: list[tuple[int, list[int]]] = field(default_factory=list)

    def add(self, number: int, request: Request, path: list[int]) -> list[int]:
        """Attach a request to the path that it shares with the previous one. Returns its own path from the root."""
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
        """The attention mask (size, size): a token attends to itself and its ancestors, padding to itself only."""
        allowed = torch.eye(size, dtype=torch.bool)
        ends = [start for start, _ in self.branches[1:]] + [len(self.tokens)]
        for (start, path), end in zip(self.branches, ends, strict=True):
            allowed[start:end, path] = True
            allowed[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        return allowed


def _shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of tokens in the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def pack(requests: Sequence[Request], block: int) -> list[Row]:
    """Pack all requests into rows of at most `block` tokens. Sorted requests share long prefixes with neighbours."""
    rows: list[Row] = []
    path: list[int] = []
    previous: tuple[int, ...] = ()
    for number in sorted(range(len(requests)), key=lambda i: requests[i].inputs):
        inputs = requests[number].inputs
        shared = _shared_prefix(previous, inputs)
        fits = bool(rows) and len(rows[-1].tokens) + len(inputs) - shared <= block
        if not fits or shared < MIN_SHARED * len(inputs):
            rows.append(Row())
            shared = 0
        path = rows[-1].add(number, requests[number], path[:shared])
        previous = inputs
    return rows


def batches(rows: Sequence[Row], size: int | None, tokens: int) -> Iterator[list[Row]]:
    """Batches of rows of similar length, longest first.

    size: the most requests per batch. If None, `tokens` is the most tokens per batch, padding included.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.tokens), reverse=True):
        longest = len(batch[0].tokens) if batch else 0
        if size is None:
            full = longest * (len(batch) + 1) > tokens
        else:
            full = sum(len(r.requests) for r in [*batch, row]) > size
        # a short row would be padded to the longest one: once a batch is large enough, a new batch costs less
        too_short = longest * len(batch) >= MIN_FILL * tokens and len(row.tokens) < MIN_LENGTH * longest
        if batch and (full or too_short):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.no_grad()
def _score(model: GPT, rows: Sequence[Row], requests: Sequence[Request]) -> list[tuple[int, float, bool]]:
    """Score one batch: per request its number, summed log-likelihood, and whether every token was the likeliest."""
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
    scored = [(index, number, nodes) for index, row in enumerate(rows) for number, nodes in row.requests]
    where = torch.tensor([index * size + node for index, _, nodes in scored for node in nodes], device=device)
    targets = torch.tensor([t for _, number, nodes in scored for t in requests[number].tokens[-len(nodes) :]])
    targets = targets.to(device)
    parts = []
    for at, target in zip(where.split(ROWS), targets.split(ROWS), strict=True):
        logits = model.logits(h.flatten(0, 1)[at])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = logits.gather(-1, target[:, None]).squeeze(-1) - logits.logsumexp(-1)
        parts.append(torch.stack([wide(chosen), wide(logits.argmax(-1) == target)]))
    scores, greedy = torch.cat(parts, 1).cpu()
    lengths = [len(nodes) for _, _, nodes in scored]
    return [
        (number, float(s.sum()), bool(g.all()))
        for (_, number, _), s, g in zip(scored, scores.split(lengths), greedy.split(lengths), strict=True)
    ]


def score(
    model: GPT,
    requests: Sequence[Request],
    batch_size: int | None = None,
    tick: Callable[[int], object] = lambda n: None,
) -> list[tuple[float, bool]]:
    """Per request, the log-likelihood of its continuation and whether greedy decoding would produce it.

    batch_size: the most requests per batch. None fills batches up to AUTO_TOKENS. A row is never split.
    tick: called after each batch with the number of requests in it.
    """
    results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
    rows = pack(requests, model.config.block)
    for batch in batches(rows, batch_size, AUTO_TOKENS.get(model.tokens.weight.device.type, 2048)):
        scores = _score(model, batch, requests)
        for number, value, greedy in scores:
            results[number] = (value, greedy)
        tick(len(scores))
    return results
