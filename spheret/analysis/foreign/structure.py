"""The sublayers of someone else's decoder, found by a trial forward pass and not by the names of its classes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spheret.analysis.foreign.arithmetic import Float64
from spheret.connections import Connection, RetractionStep
from spheret.conversion.plan import Chain, ConversionError, Reader, ResidualSum, make_plan
from spheret.conversion.steps import Step
from spheret.conversion.trace import Trace, trace_call
from spheret.kernels import compute_dtype, retract_unchecked
from spheret.model.probes import BranchKind, branch_kind
from spheret.support.errors import shortened

# the trial's batch and length; no model has heads or channels of such a number
_BATCH, _TIME = 1, 13


class NormedSum(Connection):
    """A residual sum with a norm behind it: h' = norm(h + f)."""

    def __init__(self, dim: int, norm: nn.Module):
        super().__init__(dim)
        self.norm = norm

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        with Float64() if h.dtype == torch.float64 else nullcontext():
            return self.norm(super().join(h, f))


class ConvertedStep(Connection):
    """The update of a converted model at the end of its annealing: a retraction of the sphere."""

    def __init__(self, step: Step):
        super().__init__(step.connection.dim)
        self.step = step

    @property
    def alpha(self) -> Tensor:
        return self.step.alpha.detach()

    def retraction_step(self) -> RetractionStep:
        own = self.step.connection.retraction_step()
        assert own is not None
        return own._replace(alpha=self.alpha)

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        step, wide = self.retraction_step(), compute_dtype(h, f)
        out = retract_unchecked(h.to(wide), f.to(wide), step.alpha, step.retraction, step.p, step.max_angle)
        return out.to(h.dtype)


@dataclass
class Branch:
    """One sublayer of the decoder, by the names of its modules."""

    residual: ResidualSum
    # the smallest module that is called and holds the readers and the ends of the branch
    root: str
    # the module that returns attention weights, and where in its output
    weights: tuple[str, int] | None
    parameters: list[nn.Parameter]
    kind: BranchKind
    heads: int
    connection: Connection
    step: Step | None = None
    # whether a token's output depends on other tokens. It is measured, because names may lie
    mixes_tokens: bool = True

    @property
    def name(self) -> str:
        return self.residual.name


@dataclass
class Structure:
    """The sublayers in order, and the module where their stream ends."""

    branches: list[Branch]
    leaving: Reader | None
    # a module whose output is the last state, at this index: without a reader, or behind a post-norm
    last: tuple[str, int | None] | None
    # what the sums are, e.g. "pre-norm"
    kinds: list[str]
    modules: dict[str, nn.Module]

    @property
    def is_post_norm(self) -> bool:
        return isinstance(self.branches[0].connection, NormedSum)


def trial_tokens(model: nn.Module) -> Tensor:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(text.vocab_size, (_BATCH, _TIME), generator=generator)
    return ids.to(next(model.parameters()).device)


def find_structure(model: nn.Module) -> Structure:
    """The sublayers of an unconverted decoder. What has no single stream is an error."""
    name = type(model).__name__
    ids = trial_tokens(model)
    try:
        trace, _ = trace_call(model, lambda: model(input_ids=ids, use_cache=False))
    # the code is not ours, so that any exception may come
    except Exception as error:
        raise ValueError(
            f"a trial forward pass of {name} on {_TIME} tokens failed ({shortened(str(error), 200)}): its "
            "config.json does not fit its weights."
        ) from None
    try:
        chains = make_plan(model, trace).chains
    except ConversionError as error:
        raise ValueError(f"the stream of {name} cannot be followed: {error}") from None
    residuals = [residual for chain in chains for residual in chain.sums]
    if not residuals:
        raise ValueError(f"{name} has no residual sum h + f of a stream and a module's output: there is no stream.")
    modules = dict(model.named_modules())
    post = len(chains) > 1
    if post and not _follow(trace, chains):
        places = ", ".join(chain.sums[0].name for chain in chains[:4])
        raise ValueError(
            f"{name} has {len(chains)} streams that do not follow each other (they begin at {places}), and this "
            "follows one stream from its entry to its exit."
        )
    branches = [
        _branch(model, trace, modules, residual, chain if post else None)
        for chain in chains
        for residual in chain.sums
    ]
    final = chains[-1]
    kinds = list(dict.fromkeys(residual.kind for residual in residuals))
    if post:
        return Structure(branches, None, (final.leaving[0].module, None), kinds, modules)
    if final.leaving:
        return Structure(branches, min(final.leaving, key=lambda r: r.time), None, kinds, modules)
    assert final.last is not None
    return Structure(branches, None, (final.last.module, final.last.index), kinds, modules)


def _follow(trace: Trace, chains: list[Chain]) -> bool:
    """Whether every stream is one sum with a norm behind it, whose output is the next stream."""
    if any(chain.sums[0].kind != "post-norm" for chain in chains):
        return False
    made = [{m.module for m in trace.made.get(chain.sums[0].stream, [])} for chain in chains[1:]]
    return all(chain.leaving[0].module in makers for chain, makers in zip(chains, made, strict=False))


def _branch(
    model: nn.Module, trace: Trace, modules: dict[str, nn.Module], residual: ResidualSum, post: Chain | None
) -> Branch:
    start = min(reader.time for reader in residual.readers)
    end = residual.ends[-1].time
    inside = [name for name, times in trace.calls.items() if any(start < time <= end for time in times)]
    if post is not None:
        inside.append(post.leaving[0].module)
    parameters = {id(p): p for name in inside for p in modules[name].parameters()}
    connection = (
        Connection(residual.dim) if post is None else NormedSum(residual.dim, modules[post.leaving[0].module])
    )
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return Branch(
        residual,
        _root(trace, residual),
        _attention_weights(trace, set(inside)),
        list(parameters.values()),
        branch_kind(modules[name] for name in inside),
        int(getattr(text, "num_attention_heads", 1)),
        connection.to(next(model.parameters()).device),
    )


def _root(trace: Trace, residual: ResidualSum) -> str:
    names = [reader.module.split(".") for reader in residual.readers] + [
        end.module.split(".") for end in residual.ends
    ]
    shared = 0
    while all(len(name) > shared + 1 and name[shared] == names[0][shared] for name in names):
        shared += 1
    # a list of modules is not called itself
    while shared and ".".join(names[0][:shared]) not in trace.calls:
        shared -= 1
    return ".".join(names[0][:shared])


def _attention_weights(trace: Trace, inside: set[str]) -> tuple[str, int] | None:
    for key, made in trace.made.items():
        shape = trace.tensors[key].shape
        if len(shape) == 4 and shape[-2:] == (_TIME, _TIME):
            for one in made:
                if one.module in inside and one.index is not None:
                    return one.module, one.index
    return None
