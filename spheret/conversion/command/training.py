"""One fine-tuning: the control or the converted model. It goes on from its last checkpoint, bit for bit.

Nothing random is left from one step to the next: the batches are a function of the step, and dropout is seeded by the
step. So both models see the same batches and the same masks, and weights and moments are all that a checkpoint needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spheret.conversion import Annealing, steps
from spheret.conversion.command.convert_json import Arm, Evaluation, Settings
from spheret.data import Data
from spheret.optim import AdamW, clip_gradients, parameter_groups
from spheret.runs import checkpoint
from spheret.runs.layout import MODEL, OPTIMIZER
from spheret.runs.records import StateRecord
from spheret.runs.tensors import Form, LazyTensor, form, lazy_tensor

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
# the share of the steps over which the learning rate rises, and its end, by its peak
WARM_UP, LAST_RATE = 0.05, 0.1
# checkpoints of a fine-tuning: the newest, and one to fall back to
KEEP = 2


def next_token_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of the next tokens."""
    logits = model(input_ids=x, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, data: Data, settings: Settings, device: torch.device) -> float:
    """The mean loss of the same windows of the validation split for every model."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for x, y, _ in data.validation(settings.block, settings.batch_size, settings.eval_windows):
        loss = next_token_loss(model, x.to(device), y.to(device))
        total, count = total + float(loss) * len(x), count + len(x)
    model.train(training)
    return total / count


def rate(step: int, settings: Settings) -> float:
    """The learning rate of a step from 0, by its peak: a linear rise, a plateau while t moves, a linear fall."""
    rise = min(1.0, (step + 1) / max(1, math.ceil(WARM_UP * settings.steps)))
    falling = settings.steps - settings.anneal
    return rise * (1 - (1 - LAST_RATE) * max(0, step - settings.anneal) / max(1, falling))


class FineTuning:
    """The training of one model. `arm` has what was measured so far."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        data: Data,
        device: torch.device,
        directory: Path,
        arm: Arm,
        say: Callable[[str], object],
    ):
        self.model, self.settings, self.data, self.device = model, settings, data, device
        self.directory, self.arm = directory, arm
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = AdamW(self._groups(), lr=settings.lr, betas=BETAS)
        self.loader = data.loader(settings.block, settings.batch_size, settings.seed)
        self.annealing = Annealing(model, settings.anneal) if steps(model) and settings.anneal else None
        self.done = self._restore(say)
        self.arm = arm.until(self.done)
        if self.annealing is not None:
            self.annealing.set(self.done)

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of `parameter_groups`, and one for the scalars that the conversion has added."""
        added = {id(p) for step in steps(self.model) for p in step.parameters()}
        groups = parameter_groups(self.model, WEIGHT_DECAY)
        scalars = [p for group in groups for p in group["params"] if id(p) in added]
        for group in groups:
            group |= {"params": [p for p in group["params"] if id(p) not in added], "peak": self.settings.lr}
        groups.append({"params": scalars, "weight_decay": 0.0, "peak": self.settings.alpha_lr})
        return [group for group in groups if group["params"]]

    @property
    def t(self) -> float | None:
        """The position of the annealing; None in the control."""
        return None if not steps(self.model) else 1.0 if self.annealing is None else self.annealing.t

    def evaluate(self) -> None:
        loss = validation_loss(self.model, self.data, self.settings, self.device)
        self.arm.evaluations.append(Evaluation(step=self.done, loss=_number(loss), t=self.t))

    def run(self, tick: Callable[[], object], write: Callable[[Arm], object]) -> None:
        """Train to the end. `write` is called with what was measured before each checkpoint."""
        settings = self.settings
        self.model.train()
        if not self.arm.evaluations:
            self.evaluate()
        while self.done < settings.steps:
            self._update()
            if self.done % settings.eval_every == 0 or self.done == settings.steps:
                self.evaluate()
                # written before the checkpoint: after a kill there is never a step without its losses
                write(self.arm)
                self._save()
            tick()

    def _update(self) -> None:
        settings = self.settings
        x, y = (part.to(self.device) for part in self.loader.batch(self.done))
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(settings.seed * 1_000_003 + self.done)
            loss = next_token_loss(self.model, x, y)
            loss.backward()
        reached, norm = float(loss.detach()), float(clip_gradients(self.model, CLIP))
        if not math.isfinite(norm) or not math.isfinite(reached):
            raise ValueError(
                f"the {'converted model' if steps(self.model) else 'control'} has a loss or a gradient that is not "
                f"finite at step {self.done + 1}: lower --lr, or raise --anneal."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate(self.done, settings)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.arm.losses.append(reached)
        self.done += 1
        if self.annealing is not None:
            self.annealing.step()

    def _save(self) -> None:
        moments = [
            lazy_tensor(f"{name}.{key}", value)
            for name, parameter in self.named.items()
            for key, value in sorted(self.optimizer.state[parameter].items())
        ]
        parts: dict[str, list[LazyTensor]] = {
            MODEL: [lazy_tensor(name, parameter) for name, parameter in self.named.items()],
            OPTIMIZER: moments,
        }
        checkpoint.save(self.directory, parts, StateRecord(step=self.done, val_loss=self.arm.last, training=None))
        checkpoint.prune(self.directory, KEEP, None)

    def _forms(self) -> dict[str, dict[str, Form]]:
        weights = {name: form(parameter) for name, parameter in self.named.items()}
        moments: dict[str, Form] = {}
        for name, each in weights.items():
            moments |= {f"{name}.exp_avg": each, f"{name}.exp_avg_sq": each, f"{name}.step": ("F32", ())}
        return {MODEL: weights, OPTIMIZER: moments}

    @torch.no_grad()
    def _restore(self, say: Callable[[str], object]) -> int:
        """Load the newest whole checkpoint. Returns its step, 0 if there is none."""
        checkpoint.tidy(self.directory)
        forms = self._forms()

        def check(saved: checkpoint.Checkpoint) -> None:
            checkpoint.check_tensors(saved, forms)
            if saved.step > len(self.arm.losses):
                raise checkpoint.Damaged("convert.json lacks its losses")

        try:
            saved = checkpoint.newest(self.directory, say, check)
        except ValueError:
            say(f"no checkpoint in {self.directory} is whole: this fine-tuning starts again.")
            saved = None
        if saved is None:
            return 0
        for name, value in saved.model():
            self.named[name].copy_(value)
        for key, value in saved.optimizer():
            name, _, part = key.rpartition(".")
            # AdamW keeps its count of steps on the CPU
            self.optimizer.state[self.named[name]][part] = value if part == "step" else value.to(self.device)
        return saved.step


def calibration(data: Data, settings: Settings, device: torch.device, batches: int) -> list[dict[str, Any]]:
    """Training batches on which radius and step sizes are fitted. The first steps train on them too."""
    loader = data.loader(settings.block, settings.batch_size, settings.seed)
    return [{"input_ids": loader.batch(step)[0].to(device), "use_cache": False} for step in range(batches)]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
