"""A base class for autograd.Functions that work in eager mode, under torch.compile and under torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

T = TypeVar("T")


def constant_when_traced(function: Callable[[], T]) -> Callable[[], T]:
    """Make torch.compile call the function while it traces, and use the result as a constant.

    torch.compiler.assume_constant_result does the same, but imports all of dynamo: 1.4 s at every start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# make_fx records through this dispatch mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def recorded() -> bool:
    """Whether torch.export, torch.jit.trace or make_fx records this call as a graph of torch ops.

    Such a graph outlives the process, so it must hold plain torch ops only: no kernel that takes pointers, no op of
    this library, no Python number read from a tensor.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch.jit.is_tracing() or torch._C._get_dispatch_mode(_PROXY) is not None


def needs_torch_ops(g: torch.Tensor) -> bool:
    """Whether a backward must consist of torch ops: it is differentiated or traced, or g is a batch of gradients."""
    # torch.compile traces a backward, too
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or transformed():
        return True
    return torch._C._functorch.is_legacy_batchedtensor(g)


def plain_backward(x: torch.Tensor) -> bool:
    """Whether x goes through an eager forward pass that records a backward pass, and through nothing else."""
    if not torch.is_grad_enabled() or type(x) not in (torch.Tensor, FakeTensor) or torch.compiler.is_compiling():
        return False
    return not transformed() and not recorded()


class Function(torch.autograd.Function):
    """Subclasses define `forward`, `setup_context`, `backward` and `pushforward`. `call` chooses a variant.

    | active | variant | why |
    |---|---|---|
    | torch.export, torch.jit.trace, make_fx | the ops of `forward` | the graph must hold plain torch ops |
    | torch.compile | the subclass itself | dynamo refuses a Function that has a jvp |
    | torch.func or forward mode | a subclass with `jvp` = `pushforward` | both need the jvp |
    | neither | a Function whose `forward` takes ctx | torch inspects the signature of the others: 20 us per call |
    """

    generate_vmap_rule = True
    _forward_mode: type[torch.autograd.Function]
    _eager: type[torch.autograd.Function]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "pushforward" not in cls.__dict__:
            return

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = cls.forward(*inputs)
            cls.setup_context(ctx, inputs, output)
            return output

        body = {"forward": staticmethod(forward), "backward": staticmethod(cls.backward)}
        cls._eager = type(cls.__name__, (torch.autograd.Function,), body)
        cls._forward_mode = type(cls.__name__, (cls,), {"jvp": staticmethod(cls.pushforward)})

    @staticmethod
    def pushforward(ctx: Any, *tangents: Any) -> Any:
        """The directional derivative of the outputs."""
        raise NotImplementedError("a Function must define pushforward")

    @classmethod
    def call(cls, *inputs: Any) -> Any:
        if recorded():
            return cls.forward(*inputs)
        if torch.compiler.is_compiling():
            return cls.apply(*inputs)
        return (cls._forward_mode if transformed() else cls._eager).apply(*inputs)
