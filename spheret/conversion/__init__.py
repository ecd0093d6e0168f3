"""Other people's models: `convert` puts their residual stream on a sphere, `revert` takes it off again."""

from typing import TYPE_CHECKING

from spheret.conversion.attach import steps, watched
from spheret.conversion.model import Annealing, anneal, convert, position, revert, trainer_callback
from spheret.conversion.plan import ConversionError
from spheret.conversion.report import ConversionReport, ConvertedSublayer
from spheret.conversion.wrap import Residual, ResidualStack, residual_stack
from spheret.support.lazy import lazy

if TYPE_CHECKING:
    from spheret.hub import load as load

__all__ = [
    "Annealing",
    "ConversionError",
    "ConversionReport",
    "ConvertedSublayer",
    "Residual",
    "ResidualStack",
    "anneal",
    "convert",
    "load",
    "position",
    "residual_stack",
    "revert",
    "steps",
    "trainer_callback",
    "watched",
]
# what opens saved models needs transformers, and conversion needs only torch
__getattr__, __dir__ = lazy(__name__, {"load": "spheret.hub"})
