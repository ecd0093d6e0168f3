"""spheret: deep connections for PyTorch, built around sphere retractions."""

from typing import TYPE_CHECKING

from spheret.support.lazy import lazy

__version__ = "0.2.0"

# where each name is defined: it is imported when it is first used, so that the command line starts without torch
_HOMES = {
    "GPT": "spheret.model.gpt",
    "PAPER_SCHEMES": "spheret.connections",
    "RETRACTIONS": "spheret.retractions",
    "SCHEDULES": "spheret.schedules",
    "SCHEMES": "spheret.connections",
    "Bounded": "spheret.connections",
    "Connection": "spheret.connections",
    "GPTConfig": "spheret.model.gpt",
    "Head": "spheret.model.head",
    "Residual": "spheret.conversion",
    "Retraction": "spheret.retractions",
    "ScaleNorm": "spheret.connections",
    "Scheme": "spheret.connections",
    "Shift": "spheret.model.head",
    "SpheretNorm": "spheret.connections",
    "angular": "spheret.retractions",
    "convert": "spheret.conversion",
    "kernels": "spheret.kernels",
    "list_schemes": "spheret.connections",
    "parameter_groups": "spheret.optim",
    "residual_stack": "spheret.conversion",
    "retract": "spheret.kernels",
    "revert": "spheret.conversion",
    "scheme": "spheret.connections",
    "watch": "spheret.observe",
}
__all__ = ["__version__", *_HOMES]
__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from spheret import kernels as kernels
    from spheret.connections import PAPER_SCHEMES as PAPER_SCHEMES
    from spheret.connections import SCHEMES as SCHEMES
    from spheret.connections import Bounded as Bounded
    from spheret.connections import Connection as Connection
    from spheret.connections import ScaleNorm as ScaleNorm
    from spheret.connections import Scheme as Scheme
    from spheret.connections import SpheretNorm as SpheretNorm
    from spheret.connections import list_schemes as list_schemes
    from spheret.connections import scheme as scheme
    from spheret.conversion import Residual as Residual
    from spheret.conversion import convert as convert
    from spheret.conversion import residual_stack as residual_stack
    from spheret.conversion import revert as revert
    from spheret.kernels import retract as retract
    from spheret.model.gpt import GPT as GPT
    from spheret.model.gpt import GPTConfig as GPTConfig
    from spheret.model.head import Head as Head
    from spheret.model.head import Shift as Shift
    from spheret.observe import watch as watch
    from spheret.optim import parameter_groups as parameter_groups
    from spheret.retractions import RETRACTIONS as RETRACTIONS
    from spheret.retractions import Retraction as Retraction
    from spheret.retractions import angular as angular
    from spheret.schedules import SCHEDULES as SCHEDULES
