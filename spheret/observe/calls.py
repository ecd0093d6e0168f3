"""What a model is called with, what it returns, and how it is called for a look."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from spheret.conversion.trace import undisturbed
from spheret.observe.processes import Processes
from spheret.support.errors import shortened
from spheret.support.precision import wide
from spheret.support.sharding import reshard

# the largest correction of the entropy, as a share of it, with which it is known well enough
_CORRECTION = 0.02
# the rows of a batch that the trial forward pass is given
_TRIAL_ROWS = 2


def token_ids(args: Any, kwargs: Any) -> Tensor | None:
    """The tokens that a model is called with: the first tensor of integers with two dimensions."""
    given = [kwargs["input_ids"]] if isinstance(kwargs.get("input_ids"), Tensor) else [*args, *kwargs.values()]
    return next(
        (x for x in given if isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)), None
    )


def loss_of(output: Any) -> Tensor | None:
    """A loss that a model returns: a scalar, `.loss`, ["loss"], or the first of several."""
    first = output[0] if isinstance(output, tuple) and output else output
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    for each in (named, first):
        if isinstance(each, Tensor) and each.is_floating_point() and each.numel() == 1:
            return each
    return None


def logits_of(output: Any) -> Tensor | None:
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    for each in (named, output):
        if isinstance(each, Tensor) and each.dim() == 3:
            return each
    return None


def has_tied_head(model: nn.Module, vocab: int) -> bool:
    """Whether the matrix of an embedding is also the head: two modules hold it, or no other one is of its shape."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and len(m.weight) == vocab]
    for weight in weights:
        owners = [m for m in model.modules() if any(p is weight for p in m._parameters.values())]
        alike = [p for p in model.parameters() if p.shape == weight.shape]
        if len(owners) > 1 or len(alike) == 1:
            return True
    return False


def first_rows(given: Any) -> Any:
    """The same arguments with the first rows of every tensor, if all have as many; None if one is of another kind."""
    leaves = tree_leaves(given)
    if not all(x is None or isinstance(x, (Tensor, bool, int, float, str)) for x in leaves):
        return None
    if len({len(x) for x in leaves if isinstance(x, Tensor) and x.dim()}) != 1:
        return given
    return tree_map(lambda x: x[:_TRIAL_ROWS] if isinstance(x, Tensor) and x.dim() else x, given)


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """A context for passes of ours: no gradient, no dropout, no compiled code, and nothing of the model changes."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        stack.enter_context(torch.no_grad())
        # importing the compiler takes a second, and without it nothing is compiled
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
                # FSDP2 leaves the weights of the root whole, and their gradients would not be found
                reshard(module)


class TokenCounts:
    """How often each token was seen, on the device. `entropy` is None until there are enough."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.counts: Tensor | None = None

    def see(self, ids: Tensor) -> None:
        if self.counts is None:
            self.counts = torch.zeros(self.vocab, dtype=torch.long)
        self.counts = self.counts.to(ids.device)
        flat = ids.detach().flatten().long().clamp(0, self.vocab - 1)
        self.counts.index_add_(0, flat, torch.ones_like(flat))

    def entropy(self) -> float | None:
        """That of the frequencies, in nats, with Miller's and Madow's correction for its bias."""
        if self.counts is None:
            return None
        counts = self.counts.cpu().numpy()
        seen = counts[counts > 0]
        total, kinds = int(seen.sum()), len(seen)
        if kinds < 2:
            return None
        shares, correction = seen / total, (kinds - 1) / (2 * total)
        entropy = float(-(shares * np.log(shares)).sum()) + correction
        return entropy if correction < _CORRECTION * entropy else None


class WaitingLosses:
    """Losses that are not known yet. On a GPU they are read when they are wanted, and nobody waits before."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Tensor | float]] = []

    def add(self, step: int, loss: Tensor | float) -> None:
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(f"the loss must be one number, got a tensor of shape {tuple(loss.shape)}.")
            loss = loss.detach().clone()
        else:
            try:
                loss = float(loss)
            except (OverflowError, TypeError, ValueError):
                given = shortened(repr(loss) if not isinstance(loss, int) else "a whole number beyond any float")
                raise ValueError(f"the loss must be a tensor or a float, got {given}.") from None
        self.waiting.append((step, loss))

    def known(self, wait: bool, processes: Processes) -> list[tuple[int, float]]:
        """Those that are known; all of them with `wait`. Several processes take their mean, all at the same steps."""
        here = all(not isinstance(loss, Tensor) or loss.device.type == "cpu" for _, loss in self.waiting)
        if not self.waiting or not (wait or (here and processes.size == 1)):
            return []
        steps = [step for step, _ in self.waiting]
        values = torch.stack([wide(torch.as_tensor(loss)).reshape(()) for _, loss in self.waiting])
        values = processes.sum(values) / processes.size
        self.waiting = []
        return list(zip(steps, values.tolist(), strict=True))
