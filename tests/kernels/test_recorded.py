"""Graphs that torch.export, torch.jit.trace and make_fx record hold plain torch ops, and compute the closed form."""

import operator
import warnings

import pytest
import torch
from oracle import rows
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from spheret import RETRACTIONS, kernels, retract
from spheret.bounds import bounded_softplus
from spheret.retractions import as_retraction

D = 8
H, F = rows(5, D).float(), 2 * rows(5, D, seed=1).float()
ALPHA = torch.tensor([0.7])


class Module(nn.Module):
    """A function as a module, as torch.export wants it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def fx_operators(graph):
    return {
        str(node.target) for node in graph.nodes if node.op == "call_function" and node.target != operator.getitem
    }


def export(function, inputs, strict=False):
    program = torch.export.export(Module(function), inputs, strict=strict)
    return program.module(), fx_operators(program.graph)


def jit_trace(function, inputs):
    with warnings.catch_warnings():
        # the checks of shapes are not recorded, and torch says so
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(function, inputs, check_trace=False)
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    # prim::PythonOp would be an autograd.Function
    plain = ("prim::Constant", "prim::ListConstruct", "prim::NumToTensor")
    return traced, {kind.replace("aten::", "aten.") for kind in kinds if kind not in plain}


def fx(function, inputs):
    module = make_fx(function)(*inputs)
    return module, fx_operators(module.graph)


def turn(retraction):
    return lambda h, f, alpha: retract(h, f, alpha, retraction)


WAYS = {"export": export, "jit.trace": jit_trace, "make_fx": fx}
CASES = {
    **{name: turn(retraction) for name, retraction in RETRACTIONS.items()},
    "capped": lambda h, f, alpha: retract(h, f, alpha, "exponential", max_angle=0.3),
    "a learned p": lambda h, f, alpha: retract(h, f, 0.5, alpha),
    "an angle function": turn(as_retraction(torch.tanh)),
    "the norm": lambda h, f, alpha: kernels.normalize(h + f, alpha),
    "a bounded scalar": lambda h, f, alpha: h * bounded_softplus(alpha, 0.1, 1.0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_plain_ops_and_the_closed_form(case, way):
    function, inputs = CASES[case], (H, F, ALPHA.clone().requires_grad_())
    recorded, operators = WAYS[way](function, inputs)
    assert operators
    assert all(name.startswith("aten.") for name in operators), operators
    others = (H.flip(0) * 3, F.flip(0), torch.tensor([1.9], requires_grad=True))
    with kernels.use("closed"):
        for x in (inputs, others):
            torch.testing.assert_close(recorded(*x), function(*x), rtol=0, atol=0)
        # the graph can be trained: autograd differentiates the ops
        (got,) = torch.autograd.grad(recorded(*inputs).sum(), inputs[2])
        (truth,) = torch.autograd.grad(function(*inputs).sum(), inputs[2])
    torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-6)


def test_strict_export():
    for case in ("projection", "the norm", "a bounded scalar"):
        recorded, operators = export(CASES[case], (H, F, ALPHA), strict=True)
        assert all(name.startswith("aten.") for name in operators), operators
        with kernels.use("closed"):
            assert torch.equal(recorded(H, F, ALPHA), CASES[case](H, F, ALPHA))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["projection", "the norm"])
def test_a_kernel_that_was_asked_for_is_an_error(case, way):
    for name in ("native", "triton"):
        with (
            kernels.use(name),
            pytest.raises(RuntimeError, match=f"the {name} backend was asked for, but torch.export"),
        ):
            WAYS[way](CASES[case], (H, F, ALPHA))
    for name in ("closed", "reference"):
        with kernels.use(name):
            recorded, operators = WAYS[way](CASES[case], (H, F, ALPHA))
            assert all(each.startswith("aten.") for each in operators)
            torch.testing.assert_close(recorded(H, F, ALPHA), CASES[case](H, F, ALPHA))
