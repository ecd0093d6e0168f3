"""What a checkpoint of a training holds, and how a trainer continues from one bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spheret.model.gpt import GPT
from spheret.runs import checkpoint
from spheret.runs.checkpoint import Checkpoint
from spheret.runs.config import section_as_dict
from spheret.runs.layout import CHECKPOINTS, MODEL, OPTIMIZER
from spheret.runs.records import BestRecord, StateRecord, TrainingRecord
from spheret.runs.run import check_config
from spheret.runs.tensors import Form, LazyTensor, form
from spheret.support.sharding import like, local, whole
from spheret.train.distributed import check_random_state, random_state

if TYPE_CHECKING:
    from spheret.train.loop import Trainer


def settings(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The settings that decide the updates, as plain data."""
    sections = {"model": trainer.model.config, "train": trainer.config, "evaluation": trainer.evaluation}
    return {name: section_as_dict(section) for name, section in sections.items()}


def tensors(trainer: Trainer) -> dict[str, list[LazyTensor]]:
    """The tensors of a checkpoint: weights, and the optimiser's state under the names of the weights."""

    def lazy(name: str, tensor: Tensor) -> LazyTensor:
        return LazyTensor(name, tensor.dtype, tuple(tensor.shape), lambda: whole(tensor))

    optimizer = [
        lazy(f"{name}.{key}", value)
        for name, parameter in trainer.model.named_parameters()
        for key, value in sorted(trainer.optimizer.state.get(parameter, {}).items())
    ]
    model = [lazy(name, tensor) for name, tensor in trainer.model.state_dict().items()]
    return {MODEL: model, OPTIMIZER: optimizer}


def forms(trainer: Trainer) -> dict[str, dict[str, Form]]:
    """The forms of the tensors of a checkpoint, which `tensors` returns after an update."""
    optimizer: dict[str, Form] = {}
    group_of = {parameter: group for group in trainer.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        for key in trainer.optimizer.state_names(group_of[parameter]):
            optimizer[f"{name}.{key}"] = ("F32", ()) if key == "step" else form(parameter)
    return {MODEL: {name: form(tensor) for name, tensor in trainer.model.state_dict().items()}, OPTIMIZER: optimizer}


def save(trainer: Trainer, val_loss: float | None) -> None:
    """Write a checkpoint of this step, then remove those that are not kept."""
    trainer.observer.check_weights(trainer.step)
    if val_loss is not None and (trainer.best is None or val_loss < trainer.best.val_loss):
        trainer.best = BestRecord(step=trainer.step, val_loss=val_loss)
    training = TrainingRecord(
        last_val_loss=trainer.val_loss,
        best=trainer.best,
        seconds=trainer.seconds,
        judge=trainer.observer.judge.state,
        rng=trainer.world.gather(random_state(trainer.world.device)),
        threads=torch.get_num_threads(),
        backend=trainer.backend or "none",
        config=settings(trainer),
        manifest_sha256=trainer.data_sha256,
    )
    parts, directory = tensors(trainer), trainer.path / CHECKPOINTS
    if trainer.log is None:
        # all processes gather the shards, tensor by tensor, for the one that writes
        for tensor in (tensor for part in parts.values() for tensor in part):
            tensor.gather()
        return
    # every line up to a checkpoint's step is on the disk before the checkpoint
    trainer.log.sync()
    checkpoint.save(directory, parts, StateRecord(step=trainer.step, val_loss=val_loss, training=training))
    checkpoint.prune(directory, trainer.config.keep, None if trainer.best is None else trainer.best.step)


def check(trainer: Trainer, saved: Checkpoint) -> None:
    """Raise unless this run can continue from a checkpoint: ValueError for other settings, or Damaged."""
    training = saved.state.training
    if training is None:
        raise checkpoint.Damaged("it holds only weights, and no training to resume")
    check_config(saved, trainer.path, settings(trainer))
    if training.manifest_sha256 != trainer.data_sha256:
        raise ValueError(
            f"{trainer.path} was trained on other data up to step {saved.step}: give its own with --data."
        )
    try:
        for state in training.rng:
            check_random_state(state)
    except ValueError as error:
        raise checkpoint.Damaged(str(error)) from None
    checkpoint.check_tensors(saved, forms(trainer))


@torch.no_grad()
def restore(trainer: Trainer, saved: Checkpoint) -> None:
    """Continue from a checkpoint that `check` has seen, bit for bit."""
    training = saved.state.training
    assert training is not None
    load_weights(trainer.model, saved)
    named = dict(trainer.model.named_parameters())
    for key, value in saved.optimizer():
        name, _, part = key.rpartition(".")
        placed = value.to(trainer.world.device) if value.dim() == 0 else like(value, named[name])
        trainer.optimizer.state[named[name]][part] = placed
    trainer.step, trainer.seconds = saved.step, training.seconds
    trainer.best, trainer.val_loss = training.best, training.last_val_loss
    trainer.backend_before = training.backend
    trainer.observer.judge.state = training.judge
    trainer.world.restore_random(training.rng, trainer.config.seed + trainer.step)


@torch.no_grad()
def load_weights(model: GPT, saved: Checkpoint) -> None:
    """Load the weights of a checkpoint, and nothing else."""
    wanted = model.state_dict()
    checkpoint.check_fit(saved, wanted)
    for name, value in saved.model():
        local(wanted[name]).copy_(local(like(value, wanted[name])))
