"""Someone else's decoder, with what an analysis needs: its states, its loss, and its sublayers as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spheret import conversion
from spheret.analysis.foreign.arithmetic import Float64, attention_on_own_paths
from spheret.analysis.foreign.probe import Call, ForeignSublayer, Probe, part_of, put, taken
from spheret.analysis.foreign.structure import Branch, ConvertedStep, find_structure, trial_tokens
from spheret.connections import Connection
from spheret.conversion.trace import Argument
from spheret.model.probes import BranchKind, Sublayer

# the largest relative difference between two ways to one derivative, in float64
_ROUNDING = 1e-9
# how many copies of a window run at once where every token needs its own
_COPIES = 8
# x -> (f, out): the branch's output and the next state
Both = Callable[[Tensor], tuple[Tensor, Tensor]]


class _Done(Exception):
    """The branch has ended, and what comes after it in its layer is not wanted."""


class ForeignDecoder:
    """A decoder of transformers, converted or not, in evaluation mode.

    The model is changed in place. Attention and experts become transformers' "eager" ones. Its dropouts, which are
    off, are taken out: one that ends two branches would hide which of them has ended. A model that is converted and
    not annealed yet computes what the original computes. So its conversion is taken back, and the original's stream
    is what is seen.

    Args:
        model: a causal language model of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.position: float | None = conversion.position(model) if conversion.steps(model) else None
        self.conversion: dict[str, Any] | None = getattr(model.config, "spheret", None)
        # the hooks of a conversion come back with the same step sizes
        steps = {name: x for name, x in model.state_dict().items() if ".spheret." in f".{name}"}
        if self.position is not None:
            conversion.revert(model)
        _take_out_dropouts(model)
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        self._configs: list[Any] = list(configs.values())
        for config in self._configs:
            # fast kernels have no forward derivative, or take no float64
            config._attn_implementation = config._experts_implementation = "eager"
        self.structure = find_structure(model)
        self.modules, self.branches = self.structure.modules, self.structure.branches
        self._check_causal()
        self._measure_mixing()
        if self.position:
            self._convert_again(steps)

    def _convert_again(self, steps: dict[str, Tensor]) -> None:
        if self.structure.is_post_norm:
            raise ValueError(
                f"{type(self.model).__name__} has its norms behind its sums, and its conversion has one sphere per "
                "sublayer: this follows one stream, so revert the conversion first."
            )
        assert self.conversion is not None
        ids = {"input_ids": trial_tokens(self.model), "use_cache": False}
        scheme, options = self.conversion["scheme"], self.conversion["options"]
        conversion.convert(self.model, scheme, "plain", example_inputs=ids, **options)
        self.model.load_state_dict(steps, strict=False)
        self.model.requires_grad_(False)
        for branch, step in zip(self.branches, conversion.steps(self.model), strict=True):
            branch.step = step
            branch.parameters += list(step.connection.parameters())
            if self.position == 1:
                branch.connection = ConvertedStep(step)

    @property
    def scheme(self) -> str:
        """What the sums of the model are: the norms around them, or the scheme that it was converted to."""
        if not self.position:
            return ", ".join(self.structure.kinds)
        assert self.conversion is not None
        return self.conversion["scheme"] + ("" if self.position == 1 else f", annealed to {self.position:g}")

    @property
    def width(self) -> int:
        return self.branches[0].residual.dim

    @property
    def count(self) -> int:
        return len(self.branches)

    @property
    def connections(self) -> list[Connection]:
        return [branch.connection for branch in self.branches]

    @property
    def kinds(self) -> list[BranchKind]:
        return [branch.kind for branch in self.branches]

    @property
    def names(self) -> list[str]:
        """The module that ends each branch."""
        return [branch.name for branch in self.branches]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def _check_causal(self) -> None:
        ids = trial_tokens(self.model)
        other = ids.clone()
        other[:, -1] = (ids[:, -1] + 1) % (int(ids.max()) + 1)
        with torch.no_grad():
            first, second = (self._logits(x)[:, :-1].double() for x in (ids, other))
        if not float((first - second).abs().max()) <= 1e-5 * float(first.abs().max()):
            raise ValueError(
                f"in {type(self.model).__name__} a token sees later tokens, so it is no decoder: this takes models "
                "that predict the next token."
            )

    def _measure_mixing(self) -> None:
        """Find the branches in which tokens see each other: one token changes, and the others are looked at."""
        for s in self.record(trial_tokens(self.model)):
            changed = s.h.clone()
            changed[:, 0] = changed[:, 0].flip(-1) + 0.1
            with torch.no_grad():
                before, after = (self._replayed(s, x)[:, 1:].double() for x in (s.h, changed))
            gap = float((before - after).abs().max())
            s.branch.mixes_tokens = gap > 1e-5 * float(before.abs().max())
            if s.branch.mixes_tokens == (s.kind == "mlp"):
                s.branch.kind = "other" if s.branch.mixes_tokens else "mlp"

    def arithmetic(self) -> AbstractContextManager[Any]:
        """A block in which a model of float64 computes in float64."""
        return Float64() if next(self.model.parameters()).dtype == torch.float64 else nullcontext()

    def _logits(self, tokens: Tensor) -> Tensor:
        with self.arithmetic():
            return self.model(input_ids=tokens, use_cache=False).logits

    def run(self, tokens: Tensor) -> None:
        self._logits(tokens)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self._token_losses(x, y).mean()

    @torch.no_grad()
    def token_losses(self, x: Tensor, y: Tensor) -> Tensor:
        return self._token_losses(x, y)

    def _token_losses(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self._logits(x).flatten(0, 1), y.flatten(), reduction="none").view_as(y)

    @contextmanager
    def probe(self, see: Callable[[Sublayer], object], record: bool = False) -> Iterator[None]:
        """Within the block, call `see` after every sublayer of every forward pass.

        record: keep the arguments of every branch, so that it can be run again.
        """
        watch = Probe(self.branches, see)
        with ExitStack() as stack:
            for index, branch in enumerate(self.branches):
                first = min(branch.residual.readers, key=lambda reader: reader.time)
                handles = [
                    self.modules[first.module].register_forward_pre_hook(
                        watch.state(index, first.where), with_kwargs=True
                    )
                ]
                for end in branch.residual.ends:
                    hook = watch.end(index, end.index, end.factor)
                    handles.append(self.modules[end.module].register_forward_hook(hook, prepend=True))
                if branch.weights is not None:
                    name, place = branch.weights
                    handles.append(self.modules[name].register_forward_hook(watch.weights(index, place)))
                if record:
                    handles.append(
                        self.modules[branch.root].register_forward_pre_hook(watch.call(index), with_kwargs=True)
                    )
                for handle in handles:
                    stack.callback(handle.remove)
            leaving, last = self.structure.leaving, self.structure.last
            if leaving is not None:
                hook = watch.leave(leaving.where)
                handle = self.modules[leaving.module].register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            else:
                assert last is not None
                # a conversion's hook there lengthens the state; a norm there may be removed
                handle = self.modules[last[0]].register_forward_hook(
                    watch.last(last[1]), prepend=not self.structure.is_post_norm
                )
            stack.callback(handle.remove)
            yield

    def record(self, tokens: Tensor) -> list[ForeignSublayer]:
        """The sublayers of one forward pass, each with what is needed to run it again."""
        sublayers: list[Any] = []
        with torch.no_grad(), self.probe(sublayers.append, record=True):
            self.run(tokens)
        return sublayers

    @contextmanager
    def removed(self, sublayer: int) -> Iterator[None]:
        """Within the block, this sublayer (counted from 1) passes the stream on unchanged."""
        branch = self.branches[sublayer - 1]
        seen: list[Tensor] = []
        with ExitStack() as stack:

            def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[:] = [taken(args, kwargs, first.where)]

            def stop(index: int | None, is_last: bool) -> Callable[..., Any]:
                def hook(module: nn.Module, args: Any, output: Any) -> Any:
                    if not seen:
                        # one dropout may end several branches
                        return None
                    if is_last and norm is None:
                        seen.clear()
                    return put(output, index, torch.zeros_like(part_of(output, index)))

                return hook

            first = min(branch.residual.readers, key=lambda reader: reader.time)
            norm = getattr(branch.connection, "norm", None)
            hook = self.modules[first.module].register_forward_pre_hook(start, with_kwargs=True)
            stack.callback(hook.remove)
            ends = branch.residual.ends
            for number, end in enumerate(ends, start=1):
                zeros = stop(end.index, number == len(ends))
                stack.callback(self.modules[end.module].register_forward_hook(zeros, prepend=True).remove)
            if norm is not None:
                stack.callback(norm.register_forward_hook(lambda module, args, output: seen.pop()).remove)
            yield

    def gradient_norms(self) -> list[float]:
        """The gradient norm of each sublayer's weights, its norms among them."""
        grads = [[p.grad for p in branch.parameters if p.grad is not None] for branch in self.branches]
        return [float(torch.nn.utils.get_total_norm(one)) if one else 0.0 for one in grads]

    # derivatives

    def _replayed(self, s: ForeignSublayer, x: Tensor) -> Tensor:
        """The branch's output f for the states x (1, time, width). Its layer's other arguments are as they were."""
        branch: Branch = s.branch
        assert s.call is not None
        parts: list[Tensor] = []
        ratio = None if branch.step is None else branch.step.shown_ratio(None, branch.step.way())
        shown = x if ratio is None else x * ratio
        started = False

        def read(where: Argument) -> Callable[..., Call]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
                nonlocal started
                started = True
                if isinstance(where, str):
                    return args, {**kwargs, where: shown}
                return (*args[:where], shown, *args[where + 1 :]), kwargs

            return hook

        def end(index: int | None, factor: float) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if started:
                    parts.append(part_of(output, index) * factor if factor != 1 else part_of(output, index))
                    if len(parts) == len(branch.residual.ends):
                        raise _Done

            return hook

        with ExitStack() as stack:
            for reader in branch.residual.readers:
                hook = self.modules[reader.module].register_forward_pre_hook(read(reader.where), with_kwargs=True)
                stack.callback(hook.remove)
            for one in branch.residual.ends:
                hook = self.modules[one.module].register_forward_hook(end(one.index, one.factor), prepend=True)
                stack.callback(hook.remove)
            stack.enter_context(self.arithmetic())
            args, kwargs = s.call
            try:
                self.modules[branch.root](*args, **kwargs)
            except _Done:
                return sum(parts[1:], parts[0])
        raise AssertionError(f"the branch that ends in {branch.name} did not run again")

    def whole_sequence(self, s: ForeignSublayer) -> Both:
        """The next states of all tokens as a function of all their states x (1, time, width)."""

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            f = self._replayed(s, x)
            return f, s.connection.write(x, f)

        return both

    def own_path(self, s: ForeignSublayer, positions: Tensor) -> Both:
        """The next state of each token as a function of its own state x (1, positions, width), with all others fixed.

        Attention that does not go through transformers' interface, and whatever else mixes tokens, runs once per
        token on a copy of the window, which is slower.
        """
        fast = self._fast_path(s, positions)
        return fast if not s.mixes_tokens or self._agrees(s, fast, positions) else self._slow_path(s, positions)

    def _fast_path(self, s: ForeignSublayer, positions: Tensor) -> Both:
        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            with attention_on_own_paths(self._configs):
                f = self._replayed(s, s.h.index_copy(1, positions, x))[:, positions]
            return f, s.connection.write(x, f)

        return both

    def _slow_path(self, s: ForeignSublayer, positions: Tensor) -> Both:
        places = torch.arange(s.h.shape[1], device=s.h.device)
        s.copies = _COPIES

        def one(x: Tensor, position: Tensor) -> Tensor:
            f = self._replayed(s, torch.where((places == position)[:, None], x, s.h))
            return torch.where((places == position)[:, None], f[0], 0.0).sum(0)

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            f = torch.vmap(one, chunk_size=_COPIES)(x[0], positions)[None]
            return f, s.connection.write(x, f)

        return both

    @torch.no_grad()
    def _agrees(self, s: ForeignSublayer, fast: Both, positions: Tensor) -> bool:
        """Whether the fast way is right: its values, its derivative at the last position, and that no tokens mix.

        Derivatives are compared along random directions, along which two that differ agree with probability 0.
        """
        generator = torch.Generator(s.h.device).manual_seed(s.number)
        options: dict[str, Any] = {"generator": generator, "dtype": s.h.dtype, "device": s.h.device}
        x, last = s.h[:, positions], positions[-1:]
        direction = torch.randn(x.shape, **options)
        # where no tokens mix, a factor per token comes out as it went in
        factors = 1 + torch.rand((1, len(positions), 1), **options)
        alone = torch.zeros_like(s.h)
        alone[:, last] = direction[:, -1:]
        true = torch.func.jvp(lambda x: self._replayed(s, x), (s.h,), (alone,))[1][:, last]
        try:
            value, slope = torch.func.jvp(lambda x: fast(x)[0], (x,), (direction,))[:2]
            scaled = torch.func.jvp(lambda x: fast(x)[0], (x,), (factors * direction,))[1]
        except (RuntimeError, TypeError):
            return False
        pairs = ((value, s.f[:, positions]), (slope[:, -1:], true), (scaled, factors * slope))
        return all(bool((a - b).norm() <= _ROUNDING * b.norm()) for a, b in pairs)


def _take_out_dropouts(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout and not isinstance(module, (nn.Sequential, nn.ModuleList)):
                delattr(module, name)
                setattr(module, name, _as_it_is)


def _as_it_is(x: Tensor) -> Tensor:
    return x
