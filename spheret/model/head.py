"""How logits read the stream: the heads of a GPT, and `Head` and `Shift` for models that are not ours.

A tied head is the transposed token embedding. A stream whose norm cannot grow starts as nearly the embedding itself,
so that a tied head starts by predicting the current token, and training has to leave that state first.
docs/collapse.md says what follows. A fixed orthogonal map before the head, or a head of its own, avoids it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spheret.support.precision import wide
from spheret.support.ranges import check_count
from spheret.support.sharding import like

HEADS = ("tied", "shifted", "untied")
_HALF = (torch.float16, torch.bfloat16)


class Shift(nn.Module):
    """Moves every channel by half of the width, cyclically: y_i = x_(i - dim/2), over the last dimension.

    It is a fixed orthogonal map without parameters. Put it between the last norm and a head that shares its weight
    with the token embedding: `logits = head(Shift(dim)(norm(h)))`. The head then does not read a token's own
    embedding.

    Args:
        dim: the width of the stream, at least 2.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = check_count("dim", dim, least=2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"Shift({self.dim}) needs a last dimension of {self.dim}, got {tuple(x.shape)}.")
        return x.roll(self.dim // 2, -1)

    def fold(self, weight: Tensor) -> Tensor:
        """The weight (rows, dim) of a head that reads x as `weight` reads `Shift(dim)(x)`."""
        if weight.shape[-1] != self.dim:
            raise ValueError(f"Shift({self.dim}) folds a weight of {self.dim} columns, got {tuple(weight.shape)}.")
        return weight.roll(-(self.dim // 2), -1)

    def extra_repr(self) -> str:
        return str(self.dim)


def log_frequencies(counts: Tensor | np.ndarray | Sequence[int], vocab: int) -> Tensor:
    """The log frequencies of `vocab` tokens, in float64 on the CPU: where a head's bias starts.

    counts: how often each token occurs. A token that never occurs, or lies beyond the counts, counts as 0.5
    occurrences.
    """
    counts = torch.as_tensor(counts, device="cpu").double()
    if counts.dim() != 1 or len(counts) > vocab or not (counts >= 0).all() or counts.sum() == 0:
        raise ValueError(
            f"counts must be up to {vocab} numbers, none negative and not all 0, got shape {tuple(counts.shape)}."
        )
    full = torch.full((vocab,), 0.5, dtype=torch.float64, device="cpu")
    full[: len(counts)] = counts.clamp(min=0.5)
    return (full / full.sum()).log()


class Head(nn.Module):
    """Logits of a decoder: its token embedding E, read through a `Shift` S, and a bias of the token frequencies. ::

        tied     logits = E S(x) + b
        untied   logits = W x + b

    It takes the place of the linear layer after the last norm, and shares the weight of the embedding. The bias
    starts at the log frequencies, so that the stream need not learn them. It stays in float32 if the model is made
    half-precise, and so do the logits. Initialise the model before or after: no nn.Linear has this bias.
    transformers' from_pretrained gives no values to what a checkpoint lacks: put the head in afterwards, or let the
    model's `_init_weights` call `reset_parameters`.

    Args:
        embedding: the token embedding, (vocab, width).
        counts: how often each token occurs, such as `torch.bincount(tokens)`. None starts the bias at 0.
        tied: False gives the head a weight of its own, drawn as in an nn.Linear.
    """

    def __init__(
        self, embedding: nn.Embedding, counts: Tensor | np.ndarray | Sequence[int] | None = None, tied: bool = True
    ):
        super().__init__()
        vocab, width = embedding.weight.shape
        device, dtype = embedding.weight.device, embedding.weight.dtype
        # in a tuple, which torch does not search: the weight belongs only to the embedding, in a state dict too
        self._embedding = (embedding,)
        self.shift = Shift(width) if tied else None
        self.linear = None if tied else nn.Linear(width, vocab, bias=False, device=device, dtype=dtype)
        self._start = None if counts is None else log_frequencies(counts, vocab)
        self.bias = nn.Parameter(torch.empty(vocab, device=device, dtype=torch.promote_types(dtype, torch.float32)))
        self._reset_bias()

    @property
    def weight(self) -> Tensor:
        """The weight (vocab, width) of the head."""
        return self._embedding[0].weight if self.linear is None else self.linear.weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        # transformers ties its heads by an assignment
        elif value is not self.weight:
            raise ValueError(
                "the weight of a Head is its embedding's, or its own if it is not tied: make a new Head for "
                "another embedding; in transformers config.tie_word_embeddings must say the same as tied."
            )

    def reset_parameters(self) -> None:
        """Set the bias to its start, and draw an untied weight anew."""
        self._reset_bias()
        if self.linear is not None:
            self.linear.reset_parameters()

    @torch.no_grad()
    def _reset_bias(self) -> None:
        if self._start is None:
            self.bias.zero_()
        else:
            self.bias.copy_(like(self._start, self.bias))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Head:
        # log frequencies near -10 have neighbours 0.06 away in bfloat16: the bias and its gradient follow the model
        # to a device and not to half precision
        def keep_bias(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            return tensor.to(out.device) if tensor.dim() == 1 and out.dtype in _HALF else out

        return super()._apply(keep_bias, recurse)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (..., vocab) of the output (..., width) of the last norm, in float32 or better."""
        logits = F.linear(x if self.shift is None else self.shift(x), self.weight)
        return logits + self.bias

    def extra_repr(self) -> str:
        vocab, width = self.weight.shape
        return f"{width}, {vocab}, {'tied' if self.linear is None else 'untied'}"


class UntiedHead(nn.Linear):
    """The head of a GPT with a weight of its own, (vocab, width). The GPT draws it after all other weights."""

    def __init__(self, width: int, vocab: int):
        super().__init__(width, vocab, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing, so that a model with this head draws its other weights as a model without it."""


@torch.no_grad()
def own_logit(logits: Tensor, tokens: Tensor) -> float:
    """The mean over all tokens of the logit of the token itself above the mean logit. logits: (..., vocab)."""
    own = logits.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    return float((wide(own) - wide(logits).mean(-1)).mean())
