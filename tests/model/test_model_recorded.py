"""Files of torch.export and torch.jit.trace: a GPT, run where spheret is not installed.

tests/kernels/test_recorded.py has the operations of which its connections consist.
"""

import operator
import subprocess
import sys
import warnings

import pytest
import torch

from spheret import GPT, GPTConfig
from spheret.kernels import use

# loads a file in a process that cannot import spheret, and saves what it computes
RUN = """
import sys
sys.modules["spheret"] = None
import torch
way, path, inputs, out = sys.argv[1:]
module = torch.export.load(path).module() if way == "export" else torch.jit.load(path)
torch.save([module(x).detach() for x in torch.load(inputs)], out)
assert not [name for name in sys.modules if name.startswith("spheret.")]
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(layers=1, heads=2, width=8, block=8, vocab=32, head_bias="zero")).eval()
    # scalars inside their intervals
    with torch.no_grad():
        for name, p in gpt.named_parameters():
            if name.endswith((".a", "gamma")):
                p -= 0.3
    return gpt


def export(model, x, path):
    sizes = {0: torch.export.Dim("rows", min=1, max=64), 1: torch.export.Dim("time", min=1, max=8)}
    program = torch.export.export(model, (x,), dynamic_shapes=(sizes,), strict=False)
    torch.export.save(program, path)
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    return {str(target) for target in targets if target != operator.getitem}


def trace(model, x, path):
    with warnings.catch_warnings():
        # the checks of shapes are not recorded, and torch says so
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, x, check_trace=False)
    traced.save(path)
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "prim::PythonOp" not in kinds
    return {kind.replace("::", ".") for kind in kinds if not kind.startswith("prim::")}


@pytest.mark.parametrize(
    "way", [pytest.param(export, marks=pytest.mark.slow, id="export"), pytest.param(trace, id="trace")]
)
def test_a_file_computes_what_the_model_does(way, model, tmp_path):
    # the second has a different number of rows, and of tokens
    inputs = torch.randint(32, (2, 8)), torch.randint(32, (3, 1))
    path, given, out = (tmp_path / name for name in ("model.pt2", "given", "out"))
    torch.save(inputs, given)
    operators = way(model, inputs[0], path)
    assert operators
    assert all(each.startswith("aten.") for each in operators), operators
    subprocess.run([sys.executable, "-c", RUN, way.__name__, path, given, out], check=True, cwd=tmp_path, timeout=300)
    for x, elsewhere in zip(inputs, torch.load(out), strict=True):
        torch.testing.assert_close(elsewhere, model(x), rtol=1e-5, atol=1e-5)
        with use("closed"):
            torch.testing.assert_close(elsewhere, model(x), rtol=1e-6, atol=1e-6)


def test_the_loss_is_recorded_too(model):
    x = torch.randint(32, (2, 8))
    program = torch.export.export(model, (x, x), strict=False)
    torch.testing.assert_close(program.module()(x, x), model(x, x))
    program.module()(x, x).backward()
