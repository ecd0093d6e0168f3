import torch
from torch import nn

import spheret
from spheret import Residual, SpheretNorm, residual_stack
from spheret.conversion import Annealing, anneal

CONVERT = "convert {run} --data {data} --out {out} "
ROWS = [
    ("convert {out} --data {data} --out {out}", 2, "config.json"),
    ("convert {text} --data {data} --out {out}", 2, "directory"),
    ("convert {run} --data nowhere --out {out}", 2, "--data"),
    ("convert {run} --data {data} --out {run}", 2, "not empty"),
    (CONVERT + "--scheme pre-ln", 2, "proj-spheretnorm"),
    (CONVERT + "--scheme proj-spheret", 2, "proj-spheretnorm"),
    (CONVERT + "--set inner_norm=true", 2, "inner_norm"),
    (CONVERT + "--start warm", 2, "calibrated"),
    (CONVERT + "--tokenizer gpt2", 2, "--tokenizer"),
    (CONVERT + "--block 4096", 2, "--block"),
    (CONVERT + "--batch-size 0", 2, "--batch-size"),
    (CONVERT + "--eval-windows 0", 2, "--eval-windows"),
    (CONVERT + "--threads 0", 2, "--threads"),
    (CONVERT + "--device tpu", 2, "--device"),
]


def converted():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.branch = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, h):
            return h + self.branch(self.norm(h))

    return spheret.convert(nn.Sequential(Block(), nn.LayerNorm(8)), example_inputs=torch.randn(2, 3, 8))[0]


CALLS = [
    (lambda: spheret.convert(3), TypeError, "int"),
    (lambda: spheret.revert(nn.Linear(8, 8)), ValueError, "not converted"),
    (lambda: anneal(nn.Linear(8, 8), 0.5), ValueError, "spheret.convert"),
    *((lambda t=t: anneal(converted(), t), ValueError, "from 0") for t in (-0.1, 1.1, float("nan"), True)),
    (lambda: Annealing(converted(), steps=0), ValueError, "steps"),
    (lambda: residual_stack([]), ValueError, "branch"),
    (lambda: residual_stack([torch.tanh]), ValueError, "dim"),
    (lambda: residual_stack([nn.Linear(8, 8)], spheret.scheme("pre-ln"), norm="rmsnorm"), ValueError, "options"),
    (lambda: Residual(nn.Linear(8, 8), nn.Linear(8, 8)), TypeError, "SpheretNorm"),
    (lambda: Residual(3, SpheretNorm(8, 1)), TypeError, "int"),
    (lambda: Residual(nn.Identity(), SpheretNorm(8, 1, channel_dim=1), channel_dim=2), ValueError, "channel_dim"),
]
