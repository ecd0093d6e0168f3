"""Other people's models: `convert` puts their residual stream on a sphere, `revert` takes it off again."""

from spheret.conversion.attach import steps, watched
from spheret.conversion.model import Annealing, anneal, convert, position, revert, trainer_callback
from spheret.conversion.plan import ConversionError
from spheret.conversion.report import ConversionReport, ConvertedSublayer
from spheret.conversion.wrap import Residual, ResidualStack, residual_stack

__all__ = [
    "Annealing",
    "ConversionError",
    "ConversionReport",
    "ConvertedSublayer",
    "Residual",
    "ResidualStack",
    "anneal",
    "convert",
    "position",
    "residual_stack",
    "revert",
    "steps",
    "trainer_callback",
    "watched",
]
