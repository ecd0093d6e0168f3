"""torch.compile makes one graph per kind of block, not one per layer."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from spheret import SCHEMES, SpheretNorm, scheme
from spheret.connections.base import LayerNumbers

D, BLOCKS = 8, 24
# schemes with several kinds of blocks: an early kind, a first state whose tensors share memory, or streams that the
# sublayers prefer in turn
KINDS = {"keel": 2, "mix-ln": 2, "x0": 2, "hyper": 2, "mhc": 2, "spherical-hyper": 3}
# the state of these grows from block to block
GROWING = ("denseformer", "attn-res")
# those whose layers differ, in a number or in kind. The others' layers are alike: the slow tests compile them
DIFFERENT = {*KINDS, "lns", "deepnorm", "beam", "geonorm-affine", "proj-spheretnorm", "pre-ln"}
COMPILED = [
    pytest.param(name, marks=[] if name in DIFFERENT else pytest.mark.slow) for name in SCHEMES if name not in GROWING
]


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, state):
        return self.mlp(self.attention(state, self.first), self.second)


def graphs_of(name, dynamic):
    torch.compiler.reset()
    row, graphs = scheme(name), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    blocks = nn.ModuleList(Block(*row.connect_block(D, block, BLOCKS)) for block in range(1, BLOCKS + 1))
    keys = list(blocks.state_dict())
    state = truth = row.enter(D)(torch.randn(2, 3, D, requires_grad=True))
    with torch._dynamo.config.patch(recompile_limit=2 * BLOCKS):
        for block in blocks:
            state = torch.compile(block, backend=backend, dynamic=dynamic)(state)
            truth = block(truth)
    exit = row.exit(D)
    torch.testing.assert_close(exit(state), exit(truth), rtol=1e-4, atol=1e-4)
    assert list(blocks.state_dict()) == keys == [key for key, _ in blocks.named_parameters()]
    return len(graphs)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dynamic", [False, pytest.param(None, marks=pytest.mark.slow)])
def test_one_graph_per_kind_of_block(name, dynamic):
    assert graphs_of(name, dynamic) <= KINDS.get(name, 1)


def test_symbolic_numbers_too():
    assert graphs_of("geonorm-affine", None) == graphs_of("proj-spheretnorm", None) == 1


class TestNumbers:
    def norm(self, **options):
        return SpheretNorm(D, 3, **options)

    def held(self, module):
        assert not list(module.buffers())
        tensor = module._tensors["factor"]
        assert tensor.dtype == torch.float64
        return tensor.item()

    @pytest.mark.parametrize("options", [{}, {"alpha": 0.3, "learnable_alpha": False}], ids=["learned", "fixed"])
    def test_they_survive_moves_and_copies(self, options):
        truth = 1 / math.sqrt(3) * options.get("alpha", 1.0)
        with torch.device("meta"):
            empty = self.norm(**options)
        copies = [self.norm(**options).bfloat16().double(), copy.deepcopy(self.norm(**options))]
        copies += [pickle.loads(pickle.dumps(self.norm(**options))), empty.to("meta").to_empty(device="cpu")]
        for module in copies:
            assert isinstance(module, LayerNumbers)
            assert self.held(module) == module.number("factor") == truth
        assert self.norm(**options).to("meta")._tensors["factor"].is_meta

    def test_float64_models_keep_their_digits_in_compiled_code(self):
        norm = self.norm(dtype=torch.float64)
        h, f = torch.randn(2, 4, D, dtype=torch.float64).unbind()
        torch.compiler.reset()
        compiled = torch.compile(norm, backend="aot_eager")(h, f)
        torch.testing.assert_close(compiled, norm(h, f), rtol=1e-14, atol=1e-14)
