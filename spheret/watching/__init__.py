"""What happens inside a model while it trains, in any loop: measurements, alarms, remedies."""

from spheret.watching.callbacks import lightning_callback, trainer_callback
from spheret.watching.observations import Event, Observation, SublayerObservation
from spheret.watching.watch import Stopped, Watch, watch

__all__ = [
    "Event",
    "Observation",
    "Stopped",
    "SublayerObservation",
    "Watch",
    "lightning_callback",
    "trainer_callback",
    "watch",
]
