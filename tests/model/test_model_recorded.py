"""Files of torch.export and torch.jit.trace: every spherical scheme and GPT, run where spheret is not installed."""

import operator
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from spheret import GPT, SCHEMES, GPTConfig, scheme
from spheret.connections.spherical import Spherical
from spheret.kernels import use

D = 8
SPHERICAL = [name for name in SCHEMES if isinstance(scheme(name), Spherical)]
# loads every file in a process that cannot import spheret, and saves what it computes
RUN = """
import sys
from pathlib import Path
sys.modules["spheret"] = None
import torch
for path in sorted(Path(sys.argv[1]).glob("*.in")):
    program = path.with_suffix(".pt2")
    if program.exists():
        module = torch.export.load(program).module()
    else:
        module = torch.jit.load(path.with_suffix(".ts"))
    torch.save([module(x).detach() for x in torch.load(path)], path.with_suffix(".out"))
assert not [name for name in sys.modules if name.startswith("spheret.")]
"""


class Stack(nn.Module):
    """The entry, two sublayers with linear branches, and the exit of a scheme."""

    def __init__(self, name, **options):
        super().__init__()
        built = scheme(name, **options)
        self.enter, self.leave = built.enter(D), built.exit(D)
        self.connections = nn.ModuleList(built.connect(D, sublayer, 2) for sublayer in (1, 2))
        self.branches = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, h):
        h = self.enter(h)
        for connection, branch in zip(self.connections, self.branches, strict=True):
            h = connection(h, branch)
        return self.leave(h)


# recorded together, because a recording takes long to begin
STACKS = {
    **{name: (name, {}) for name in SPHERICAL},
    "learned p": ("p-spheretnorm", {"learnable_p": True}),
    "exact clamp": ("proj-spheretnorm", {"exact_clamp": True}),
}


class Stacks(nn.ModuleList):
    def forward(self, h):
        return torch.stack([stack(h) for stack in self])


def models():
    """Per name a model and two inputs. The second has another number of rows."""
    torch.manual_seed(0)
    stacks = Stacks(Stack(name, **options) for name, options in STACKS.values())
    gpt = GPT(GPTConfig(layers=1, heads=2, width=D, block=8, vocab=32, head_bias="zero")).eval()
    # scalars inside their intervals
    with torch.no_grad():
        for model in (stacks, gpt):
            for name, p in model.named_parameters():
                if name.endswith((".a", "gamma")):
                    p -= 0.3
    return {
        "stacks": (stacks, (torch.randn(3, 5, D), torch.randn(7, 5, D))),
        "gpt": (gpt, (torch.randint(32, (2, 8)), torch.randint(32, (3, 1)))),
    }


def export(model, inputs, path):
    sizes = {0: torch.export.Dim("rows", min=1, max=64)}
    if inputs[0].dim() == 2:
        sizes[1] = torch.export.Dim("time", min=1, max=8)
    program = torch.export.export(model, (inputs[0],), dynamic_shapes=(sizes,), strict=False)
    torch.export.save(program, path.with_suffix(".pt2"))
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    return {str(target) for target in targets if target != operator.getitem}


def trace(model, inputs, path):
    with warnings.catch_warnings():
        # the checks of shapes are not recorded, and torch says so
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, inputs[0], check_trace=False)
    traced.save(path.with_suffix(".ts"))
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "prim::PythonOp" not in kinds
    return {kind.replace("::", ".") for kind in kinds if not kind.startswith("prim::")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Per way and model: the operators of the graph, what the model computes, and what its file does elsewhere."""
    folder, found = tmp_path_factory.mktemp("recorded"), {}
    for name, (model, inputs) in models().items():
        for way in (export, trace):
            path = folder / f"{way.__name__}-{name}.in"
            torch.save(inputs, path)
            with use("closed"):
                truth = [model(x).detach() for x in inputs]
            found[way.__name__, name] = way(model, inputs, path), truth, [model(x).detach() for x in inputs], path
    subprocess.run([sys.executable, "-c", RUN, str(folder)], check=True, cwd=folder, timeout=300)
    return {key: (*rest, torch.load(path.with_suffix(".out"))) for key, (*rest, path) in found.items()}


def assert_same(operators, closed, eager, elsewhere):
    assert operators
    assert all(each.startswith("aten.") for each in operators), operators
    for got, same, near in zip(elsewhere, closed, eager, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, same, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got, near, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["export", "trace"])
@pytest.mark.parametrize("name", STACKS)
def test_a_file_of_each_scheme_computes_what_the_modules_do(name, way, recorded):
    operators, *results = recorded[way, "stacks"]
    number = list(STACKS).index(name)
    assert_same(operators, *([each[number] for each in result] for result in results))


@pytest.mark.parametrize("way", ["export", "trace"])
def test_a_file_of_a_gpt_computes_what_the_model_does(way, recorded):
    assert_same(*recorded[way, "gpt"])


def test_the_loss_is_recorded_too():
    model, (x, _) = models()["gpt"]
    program = torch.export.export(model, (x, x), strict=False)
    torch.testing.assert_close(program.module()(x, x), model(x, x))
    program.module()(x, x).backward()
