"""How logits read the stream: the heads of a GPT, and `Shift` for models that are not ours.

A tied head is the transposed token embedding. A stream whose norm cannot grow starts as nearly the embedding itself,
so that a tied head starts by predicting the current token, and training has to leave that state first.
docs/collapse.md says what follows. A fixed orthogonal map before the head, or a head of its own, avoids it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spheret.model.linear import Linear
from spheret.support.precision import wide
from spheret.support.ranges import check_count

HEADS = ("tied", "shifted", "untied")


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


class Head(Linear):
    """A head with a weight of its own, (vocab, width). The GPT draws it after all other weights."""

    def __init__(self, width: int, vocab: int):
        super().__init__(width, vocab, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing, so that a model with this head draws its other weights as a model without it."""


@torch.no_grad()
def own_logit(logits: Tensor, tokens: Tensor) -> float:
    """The mean over all tokens of the logit of the token itself above the mean logit. logits: (..., vocab)."""
    own = logits.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    return float((wide(own) - wide(logits).mean(-1)).mean())
