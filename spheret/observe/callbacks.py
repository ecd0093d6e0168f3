"""`spheret.watch` for transformers' Trainer, which has a loop of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from spheret.observe.watch import Watch
from spheret.support.errors import need

if TYPE_CHECKING:
    from transformers import TrainerCallback


def trainer_callback(every: int = 50, **options: Any) -> TrainerCallback:
    """A callback for transformers' Trainer: its attribute `watch` is the `Watch`.

    The Trainer clips before it calls it: give it `max_grad_norm=0` to see the gradient norms as they were.

    Args:
        every: the first step and every `every`-th one are watched.
        options: the options of `watch`.
    """
    transformers = need("transformers", "hub")

    class WatchCallback(transformers.TrainerCallback):  # type: ignore[name-defined]
        """Watches the Trainer's model."""

        watch: Watch | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            self.watch = Watch(model, every, **options)
            self.watch.steps = state.global_step

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                # the Trainer counts the tokens of all processes, so that their losses add up
                self.watch.step(self.watch.own_loss(args.world_size if args.average_tokens_across_devices else 1))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                self.watch.close()

    return WatchCallback()
