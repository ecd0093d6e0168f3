"""What happens inside a model while it trains, in any loop: measurements, alarms, remedies."""

from spheret.observe.records import Event, Observation, SublayerObservation
from spheret.observe.watch import Watch, trainer_callback, watch

__all__ = [
    "Event",
    "Observation",
    "SublayerObservation",
    "Watch",
    "trainer_callback",
    "watch",
]
