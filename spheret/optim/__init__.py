"""AdamW and Muon, their groups of parameters, and gradient clipping for a model with connections.

`lr_schedules` has the learning rate of each update, `parametrization` the rules that carry it over to other sizes.
"""

from spheret.optim.adamw import AdamW
from spheret.optim.build import OPTIMIZERS, build_optimizer, clip_gradients, set_learning_rate
from spheret.optim.groups import EPSILON, Factors, hidden_matrices, optimizer_groups, parameter_groups
from spheret.optim.muon import Muon, newton_schulz_flops, orthogonalized, shared_out, update_scale

__all__ = [
    "EPSILON",
    "OPTIMIZERS",
    "AdamW",
    "Factors",
    "Muon",
    "build_optimizer",
    "clip_gradients",
    "hidden_matrices",
    "newton_schulz_flops",
    "optimizer_groups",
    "orthogonalized",
    "parameter_groups",
    "set_learning_rate",
    "shared_out",
    "update_scale",
]
