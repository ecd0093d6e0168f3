"""spheret: deep connections for PyTorch, built around sphere retractions."""

from spheret import kernels
from spheret.connections import (
    PAPER_SCHEMES,
    SCHEMES,
    Connection,
    ScaleNorm,
    Scheme,
    SpheretNorm,
    scheme,
)
from spheret.gpt import GPT, GPTConfig
from spheret.kernels import retract
from spheret.optim import parameter_groups
from spheret.retractions import RETRACTIONS, Retraction, angular
from spheret.schedules import SCHEDULES
from spheret.version import __version__

__all__ = [
    "GPT",
    "PAPER_SCHEMES",
    "RETRACTIONS",
    "SCHEDULES",
    "SCHEMES",
    "Connection",
    "GPTConfig",
    "Retraction",
    "ScaleNorm",
    "Scheme",
    "SpheretNorm",
    "__version__",
    "angular",
    "kernels",
    "parameter_groups",
    "retract",
    "scheme",
]
