"""`spheret.watch` for trainers that have a loop of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from spheret.support.errors import need
from spheret.watching.watch import Watch

if TYPE_CHECKING:
    from transformers import TrainerCallback


def trainer_callback(every: int = 50, **options: Any) -> TrainerCallback:
    """A callback for transformers' Trainer: its attribute `watch` is the `Watch`.

    The Trainer clips before it calls it: give it `max_grad_norm=0` to see the gradient norms as they were.

    Args:
        every: the first step and every `every`-th one are watched.
        options: those of `watch`.
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


def lightning_callback(every: int = 50, of: str = "", **options: Any) -> Any:
    """A callback for Lightning: its attribute `watch` is the `Watch`. The loss is that of `training_step`.

    Args:
        every: the first step and every `every`-th one are watched.
        of: the name of the module inside of the LightningModule that `training_step` calls, e.g. "model"; by default
            the LightningModule itself, if it calls `self(...)`.
        options: those of `watch`.
    """
    lightning = need("lightning", "hub")

    class WatchCallback(lightning.Callback):  # type: ignore[name-defined]
        """Watches the LightningModule."""

        watch: Watch
        # of the micro-batches of an update; Lightning has divided each by their number
        loss: Any = 0.0

        def on_fit_start(self, trainer: Any, module: nn.Module) -> None:
            self.watch = Watch(module.get_submodule(of), every, **options)

        def on_before_backward(self, trainer: Any, module: nn.Module, loss: Any) -> None:
            self.loss = self.loss + loss.detach()

        def on_before_optimizer_step(self, trainer: Any, module: nn.Module, optimizer: Any) -> None:
            self.watch.step(self.loss)
            self.loss = 0.0

        def on_fit_end(self, trainer: Any, module: nn.Module) -> None:
            self.watch.close()

    return WatchCallback()
