"""What a conversion refuses before it starts, and whether a converted model computes what the original did.

In the check, every module but those that pass the stream on is called with the numbers of the original. So the two
forward passes are compared call by call. A model whose last layer is zero, or which returns integers, is compared as
any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from spheret.connections import SCHEMES, Spherical
from spheret.connections import scheme as make_scheme
from spheret.conversion.attach import NAME, steps
from spheret.conversion.plan import ConversionError, ConversionPlan, ResidualSum, residual_sums
from spheret.conversion.trace import Argument, Key, Trace, call, is_rows, returned_tensors, trace_call
from spheret.support.errors import unknown

Start = Literal["exact", "calibrated", "plain"]

# options of a spherical scheme that a converted model has no place for, with the only value that is allowed
_FIXED = {
    "inner_norm": (False, "the model keeps the norms before its branches"),
    "final_norm": (True, "the model keeps its own last norm"),
    "entry_norm": (True, "a converted stream needs the radius of the entry's ScaleNorm"),
    "bias": (True, "the model keeps its own norms"),
    "output_init": ("scaled", "the model keeps its weights"),
    "branch_norm": (None, "the model's branches have learned how long their outputs are"),
}
# where softplus(a) starts in its interval (0, 1] unless asked otherwise. The unit makes up for it, and the step size
# can both fall and double
_ALPHA_SHARE = 0.5
# how far a tensor may be from the original's, by its largest entry. It tells a wrong plan from rounding
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
# a tensor whose largest entry is smaller than this may be what rounding left of a difference
_SMALL = 1e-3


def spherical_scheme(name: str, start: str, options: dict[str, Any]) -> Spherical:
    """The scheme that a model is converted to. Refuses what has no place in someone else's model."""
    if start not in get_args(Start):
        raise unknown("start", start, get_args(Start))
    if start != "plain" and "alpha" not in options:
        options = {**options, "alpha": _ALPHA_SHARE}
    chosen = make_scheme(name, **({} if not _is_spherical(name) else options))
    if not isinstance(chosen, Spherical):
        spherical = ", ".join(other for other in SCHEMES if _is_spherical(other))
        why = "which {} does not" if chosen.one_stream else "and {} carries more than one"
        raise ValueError(f"convert puts one stream on a sphere, {why.format(name)}: take one of {spherical}.")
    for option, (allowed, why) in _FIXED.items():
        if getattr(chosen, option) != allowed:
            raise ValueError(f"{option} = {getattr(chosen, option)!r} does not fit a conversion: {why}.")
    return chosen


def _is_spherical(name: str) -> bool:
    built = SCHEMES[name]() if name in SCHEMES else None
    return isinstance(built, Spherical) and built.branch_norm is None


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be converted, each with its own sentence."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch module, got {type(model).__name__}.")
    if steps(model):
        raise ConversionError(
            "this model is converted already: call spheret.revert(model) before converting it anew."
        )
    if getattr(getattr(model, "config", None), NAME, None) is not None:
        raise ConversionError(
            "this model was saved after a conversion, and transformers has left out its step sizes: load it with "
            "spheret.hub.load(directory)."
        )
    parameters = dict(model.named_parameters())
    if not any(p.is_floating_point() for p in parameters.values()):
        raise ConversionError(f"{type(model).__name__} has no parameters, so it has no residual branches.")
    inference = next((name for name, p in parameters.items() if p.is_inference()), None)
    if torch.is_inference_mode_enabled() or inference is not None:
        what = "convert was called" if inference is None else f"{inference} was made"
        raise ConversionError(
            f"{what} under torch.inference_mode(), whose tensors cannot be trained: build and convert the model "
            "outside of it."
        )
    quantised = next((name for name, module in model.named_modules() if _is_quantised(module)), None)
    if getattr(model, "is_quantized", False) or quantised is not None:
        raise ConversionError(
            f"{quantised or 'the model'} is quantised, and no retraction reproduces rounded outputs: convert the "
            "model before it is quantised."
        )
    meta = next((name for name, p in parameters.items() if p.is_meta), None)
    if meta is not None:
        raise ConversionError(f"{meta} is on the meta device: load the weights before converting the model.")


def _is_quantised(module: nn.Module) -> bool:
    words = f"{type(module).__module__}.{type(module).__name__}".lower()
    if "quantized" in words or "bitsandbytes" in words:
        return True
    return any(not p.is_floating_point() for p in module.parameters(recurse=False))


def check_gains(model: nn.Module, plan: ConversionPlan) -> None:
    """Refuse a branch that the layer multiplies by 0: behind a 0 no hook can return the next state."""
    for residual in (one for chain in plan.chains for one in chain.sums):
        for name in (name for end in residual.ends for name in end.gains):
            if not model.get_parameter(name).all():
                raise ConversionError(
                    f"{residual.where} multiplies its branch by {name}, which has zeros, so that the layer adds "
                    "nothing of what a hook returns there. Train it first, or start it at a small number."
                )


def skips_layers(model: nn.Module, inputs: Any, plan: ConversionPlan) -> bool:
    """Whether the model leaves out layers at random in training mode.

    Raises ConversionError if it then adds a branch differently, as where its code drops branches at random.
    """
    model.train()
    try:
        trace, _ = trace_call(model, lambda: call(model, inputs), chances=True)
    except Exception:
        # it may want labels, or a larger batch
        return False
    finally:
        model.eval()
    sums = {_modules_of(residual) for residual in residual_sums(model, trace)}
    skips = False
    for residual in (one for chain in plan.chains for one in chain.sums):
        ends, readers = _modules_of(residual)
        if (ends, readers) in sums:
            continue
        if any(trace.calls[name] for name in ends):
            raise ConversionError(
                f"in training mode {residual.where} adds something else to the stream than in evaluation mode, e.g. "
                "because it drops branches at random in a function. Use a module for it, or set its probability to 0."
            )
        skips = True
    return skips


def _modules_of(residual: ResidualSum) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(end.module for end in residual.ends), tuple(reader.module for reader in residual.readers)


def copied_outputs(output: Any) -> list[Tensor]:
    """A copy of the floating-point tensors in what a model returns, without the stream itself and the caches."""
    return [x.detach().clone() for x in returned_tensors(output)]


def _gap(x: Tensor, y: Tensor) -> float:
    """The largest difference by the largest finite |x|. Masks hold -inf, which differs from itself by NaN."""
    x, y = x.detach().cpu().double(), y.detach().cpu().double()
    same = (x == y) | (x.isnan() & y.isnan())
    largest = x[x.isfinite()].abs().max() if x.isfinite().any() else x.new_tensor(0.0)
    return float(torch.where(same, 0.0, x - y).abs().max() / largest.clamp(min=_SMALL)) if x.numel() else 0.0


# where a call of a module is to be given which tensor of the original, and when it was
Expected = dict[Argument, tuple[Key, int]]


class Comparison:
    """The original as its trace has it, to which a converted model is compared.

    difference: the largest gap of an output, once the outputs were compared.
    """

    def __init__(self, model: nn.Module, trace: Trace, plan: ConversionPlan, outputs: list[Tensor]):
        self.name, self.trace, self.outputs, self.difference = type(model).__name__, trace, outputs, 0.0
        self.modules = dict(model.named_modules())
        self.sums = [residual for chain in plan.chains for residual in chain.sums]
        self.leaving = {(chain.sums[-1].result, read.module) for chain in plan.chains for read in chain.leaving}
        # what is compared after the last residual sum tells whether the stream has left as it should
        results = {chain.sums[-1].result for chain in plan.chains}
        self.end = max(addition.time for addition in trace.additions if addition.result in results)
        self.compared_after = False

    def _expected(self) -> dict[str, list[Expected]]:
        """What each call of each module is to be given."""
        streams = {residual.result for residual in self.sums}
        readers = {(one.stream, reader.module) for one in self.sums for reader in one.readers} | self.leaving
        # a module that adds may be given f, too: it has x' - x in its place
        adding = {(end.key, name) for one in self.sums for end in one.ends for name in one.path}
        calls: dict[str, dict[int, Expected]] = defaultdict(lambda: defaultdict(dict))
        for key, reads in self.trace.reads.items():
            for read in reads:
                given = calls[read.module][read.time]
                # layers and dropouts pass the stream on, and its rows are compressed
                if (key not in streams or (key, read.module) in readers) and (key, read.module) not in adding:
                    given[read.where] = key, read.time
        return {name: [calls[name][time] for time in sorted(calls[name])] for name in calls}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which each call of a module is compared with the original's."""
        handles = [
            self.modules[name].register_forward_pre_hook(self._hook(name, iter(calls)), with_kwargs=True)
            for name, calls in self._expected().items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, calls: Iterator[Expected]) -> Callable[..., None]:
        def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not any(map(is_rows, (*args, *kwargs.values()))):
                return
            what = f"what {name or self.name} ({type(module).__name__}) is given"
            given = {**dict(enumerate(args)), **kwargs}
            for where, (key, time) in next(calls, {}).items():
                self._check(self.trace.values[key], given.get(where), time, what)

        return compare

    def _check(self, x: Tensor, y: Any, time: int, what: str) -> float:
        if not isinstance(y, Tensor) or x.numel() != y.numel():
            raise ConversionError(f"after the conversion, {what} has a different shape. The model was reverted.")
        gap = _gap(x, y.reshape(x.shape))
        if not gap <= _TOLERANCES.get(x.dtype, 1e-3):
            raise ConversionError(
                f"in the converted {self.name} {what} differs from the original's by {gap:.1e} of its largest entry: "
                "a part of the model before it reads the stream where no hook sees it. The model was reverted."
            )
        self.compared_after |= time > self.end and bool(x.any())
        return gap

    def check_outputs(self, output: Any) -> None:
        """Compare what the model returns. Raises ConversionError if nothing behind the last sum could be compared."""
        outputs = copied_outputs(output)
        if [x.shape for x in outputs] != [x.shape for x in self.outputs]:
            raise ConversionError(
                f"the converted {self.name} returns other outputs than the original. It was reverted."
            )
        pairs = zip(self.outputs, outputs, strict=True)
        gaps = [self._check(x, y, self.end + 1, "what the model returns") for x, y in pairs]
        self.difference = max(gaps, default=0.0)
        if not self.compared_after:
            raise ConversionError(
                f"nothing that {self.name} returns, or gives to a module behind its last residual sum (that of "
                f"{self.sums[-1].name}), can be compared with the original's: it returns no floating-point tensor, "
                "or only zeros. Return the logits or the stream, and convert again. The model was reverted."
            )
