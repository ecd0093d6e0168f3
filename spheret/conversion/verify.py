"""Whether a converted model computes what the original did: what its modules are given, and what it returns.

At t = 0 every module but those that pass the stream on is called with the very numbers of the original. So the two
forward passes are compared call by call. A model whose last layer is zero, or which returns integers, is compared as
any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spheret.conversion.plan import ConversionError, ConversionPlan
from spheret.conversion.trace import Argument, Key, Trace, is_rows, returned_tensors

# how far a tensor may be from the original's at t = 0, by its largest entry. It tells a wrong plan from rounding
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
# a tensor whose largest entry is smaller than this may be what rounding left of a difference
_SMALL = 1e-3


def outputs(output: Any) -> list[Tensor]:
    """A copy of the floating-point tensors in what a model returns, without the stream itself and the caches."""
    return [x.detach().clone() for x in returned_tensors(output)]


def _gap(x: Tensor, y: Tensor) -> float:
    """The largest difference by the largest |x|."""
    x, y = x.detach().cpu().double(), y.detach().cpu().double()
    return float((x - y).abs().max() / x.abs().max().clamp(min=_SMALL)) if x.numel() else 0.0


def _tolerance(x: Tensor) -> float:
    return _TOLERANCES.get(x.dtype, 1e-3)


class Comparison:
    """The original as its trace has it, to which a converted model is compared."""

    def __init__(self, model: nn.Module, trace: Trace, plan: ConversionPlan, returned: list[Tensor]):
        self.name, self.trace, self.returned = type(model).__name__, trace, returned
        self.modules = dict(model.named_modules())
        # what is compared after the last residual sum tells whether the stream has left as it should
        results = {chain.sums[-1].result for chain in plan.chains}
        self.last = max(addition.time for addition in trace.additions if addition.result in results)
        self.last_name = plan.chains[-1].sums[-1].name
        self.compared_after = False
        self.difference = 0.0
        self.expected = self._expected(plan)

    def _expected(self, plan: ConversionPlan) -> dict[str, list[dict[Argument, tuple[Key, int]]]]:
        """For each call of each module: where it is to be given which tensor, and when."""
        sums = [residual for chain in plan.chains for residual in chain.sums]
        streams = {residual.result for residual in sums}
        readers = {(residual.stream, reader.module) for residual in sums for reader in residual.readers}
        readers |= {(chain.sums[-1].result, reader.module) for chain in plan.chains for reader in chain.leaving}
        # a module that adds may be given f, too: it has the step of the sphere in its place
        adding = {(end.key, name) for residual in sums for end in residual.ends for name in residual.path}
        calls: dict[str, dict[int, dict[Argument, tuple[Key, int]]]] = defaultdict(lambda: defaultdict(dict))
        for key, reads in self.trace.reads.items():
            for read in reads:
                given = calls[read.module][read.time]
                # layers and dropouts pass the stream on, and that is on the sphere
                if (key not in streams or (key, read.module) in readers) and (key, read.module) not in adding:
                    given[read.where] = key, read.time
        return {name: [calls[name][time] for time in sorted(calls[name])] for name in calls}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which each call of a module is compared with the original's."""
        handles = [
            self.modules[name].register_forward_pre_hook(self._compare(name, iter(calls)), with_kwargs=True)
            for name, calls in self.expected.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _compare(self, name: str, calls: Iterator[dict[Argument, tuple[Key, int]]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not any(map(is_rows, (*args, *kwargs.values()))):
                return
            what = f"what {name or self.name} ({type(module).__name__}) is given"
            for where, (key, time) in next(calls, {}).items():
                x = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
                self._check(self.trace.values[key], x, time, what)

        return hook

    def _check(self, x: Tensor, y: Any, time: int, what: str) -> float:
        if not isinstance(y, Tensor) or x.numel() != y.numel():
            raise ConversionError(f"after the conversion, {what} has another shape. The model was reverted.")
        gap = _gap(x, y.reshape(x.shape))
        if not gap <= _tolerance(x):
            raise ConversionError(
                f"at the exact start of {self.name}, {what} differs from the original's by {gap:.1e} of its largest "
                "entry: a part of the model before it reads the stream where no hook sees it. The model was reverted."
            )
        self.compared_after |= time > self.last and bool(x.any())
        return gap

    def check_outputs(self, output: Any) -> None:
        """Compare what the model returns. Raises ConversionError if nothing behind the last sum could be compared."""
        returned = outputs(output)
        if len(returned) != len(self.returned) or any(
            x.shape != y.shape for x, y in zip(self.returned, returned, strict=True)
        ):
            raise ConversionError(
                f"the converted {self.name} returns other outputs than the original. It was reverted."
            )
        for x, y in zip(self.returned, returned, strict=True):
            self.difference = max(self.difference, self._check(x, y, self.last + 1, "what the model returns"))
        if not self.compared_after:
            raise ConversionError(
                f"nothing that {self.name} returns, or gives to a module behind its last residual sum (that of "
                f"{self.last_name}), can be compared with the original's: it returns no floating-point tensor, or "
                "zeros alone. Return the logits or the stream, and convert again. The model was reverted."
            )
