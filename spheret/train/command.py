"""`spheret train`: from flags to a run directory."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch

# tyro reads annotations from the module
import tyro

from spheret.data import CORPORA, Data, open_named
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs import checkpoint
from spheret.runs.config import FREE, Options, TrainConfig, from_toml, options_of, resolve_model, resolve_training
from spheret.runs.directory import check_space, claimed, existing, explained
from spheret.runs.layout import CHECKPOINTS
from spheret.runs.run import Run, describe_data, manifest_sha256, open_run, write_config
from spheret.support import files, machine
from spheret.support.allocator import keep_freed_memory
from spheret.train.distributed import Group, World, join
from spheret.train.loop import FINISHED, Observer, Trainer


def differences(run: Run, model: GPTConfig, training: TrainConfig, data: Data) -> list[str]:
    """How what was asked differs from what the run is, apart from what may change."""
    saved = {**run.config["model"], **run.config["train"], "data": run.config["data"]["manifest_sha256"]}
    asked = {**model.as_dict(), **training.as_dict(), "data": manifest_sha256(data)}
    return [
        f"{key} (the run has {saved.get(key)!r}, asked for {value!r})"
        for key, value in asked.items()
        if key not in FREE and saved.get(key) != value
    ]


def _resolved(
    run: Run | None, options: Options, device: torch.device, world_size: int
) -> tuple[GPTConfig, TrainConfig, Data]:
    """Model, training and data; for a run that goes on, what it has wherever nothing else is said."""
    if run is not None:
        if run.config["data"]["path"] is None:
            raise ValueError(
                f"{run.path} was not trained here: start a run of its weights with --init-from {run.path}."
            )
        given = options.given()
        if "data" not in given and not Path(run.config["data"]["path"]).is_dir():
            raise FileNotFoundError(
                f"the data of {run.path} is no longer at {run.config['data']['path']}: give its place with --data."
            )
        was = options_of(run.model_config, TrainConfig.from_dict(run.config["train"]))
        if given.keys() & {"layers", "heads", "width"}:
            was = replace(was, size=None)
        options = replace(was, **{"data": run.config["data"]["path"], **given})
    if options.data is None:
        raise ValueError(f"--data is needed: a directory made by spheret prepare, or one of {', '.join(CORPORA)}.")
    # wrong numbers are found before a corpus is prepared
    training = resolve_training(options, device.type, world_size)
    resolve_model(options, 1, options.vocab or 64)
    data = open_named(options.data, options.tokenizer, quiet=False)
    model = resolve_model(options, data.vocab_size, data.padded_vocab_size)
    if run is not None:
        found = differences(run, model, training, data)
        if found:
            raise ValueError(f"{run.path} is another run; these differ: {', '.join(found)}. Give another --out.")
    return model, training, data


def _built(model: GPTConfig, training: TrainConfig, data: Data) -> GPT:
    torch.manual_seed(training.seed)
    return GPT(model, data.counts() if model.head_bias == "unigram" else None)


def _initial(source: str, trainer: Trainer) -> None:
    """Weights from another run, or from one checkpoint of it."""
    path = Path(source).expanduser()
    if path.parent.name == CHECKPOINTS:
        try:
            saved = checkpoint.verify(path)
        except checkpoint.Damaged as error:
            raise ValueError(f"--init-from {source} is no whole checkpoint, {error}: give another.") from None
        trainer.load_weights(saved)
    else:
        trainer.load_weights(open_run(path).checkpoint())


def _observers(training: TrainConfig) -> dict[str, tuple[int, Observer]]:
    if not training.certify_every:
        return {}
    # the one look to the right: analysis is imported when it is asked for
    live = importlib.import_module("spheret.analysis.live_certificate")
    return {"certificate": (training.certify_every, live.observer())}


def _environment(world: World) -> dict[str, Any]:
    return {
        **machine.machine(),
        "device": world.device.type,
        "processes": world.size,
        "parallel": world.parallel if isinstance(world, Group) else None,
        "commit": machine.commit(),
        "command": shlex.join(["spheret", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@tyro.conf.configure(tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction)
def train(
    out: str,
    options: Annotated[Options, tyro.conf.arg(name="")],
    config: Path | None = None,
    resume: bool = False,
    force: bool = False,
    device: str | None = None,
    threads: int | None = None,
    tensorboard: bool = True,
    quiet: bool = False,
    parallel: str | None = None,
    timeout: int = 600,
) -> int:
    """Train a GPT under any scheme; killed at any moment, it goes on to the bit with --resume.

    Exit codes: 0 finished, 2 bad input or a disk that failed, 3 stopped by a guard (a loss or gradient that is not
    finite), 130 and 143 stopped by Ctrl-C or SIGTERM, saved.

    Args:
        out: the run directory.
        options: what to train.
        config: a TOML file of the same options; flags win over it.
        resume: go on with the run in --out; where it has no checkpoint, start.
        force: start again, removing the run in --out.
        device: cuda, mps or cpu; by default the first of these that is there.
        threads: CPU threads; a resumed run takes those it had, for they decide the last bits.
        tensorboard: write TensorBoard's files too, where it is installed.
        quiet: no progress.
        parallel: ddp or fsdp, for processes that torchrun starts.
        timeout: seconds to wait for the other processes.
    """
    if config is not None:
        options = replace(options, **{**from_toml(config), **options.given()})
    most = 8 * machine.cores()
    if threads is not None and not 1 <= threads <= most:
        raise ValueError(f"--threads must lie between 1 and {most}, eight a core, got {threads}.")
    if threads is not None:
        torch.set_num_threads(threads)
    world = join(device, parallel, timeout)
    try:
        return _train(world, Path(out).expanduser(), options, resume, force, threads, tensorboard, quiet)
    finally:
        world.close()


def _train(
    world: World,
    path: Path,
    options: Options,
    resume: bool,
    force: bool,
    threads: int | None,
    tensorboard: bool,
    quiet: bool,
) -> int:
    # the main process looks, and prepares a corpus, before the others do
    run = existing(path, resume, force) if world.is_main else None
    resolved = _resolved(run, options, world.device, world.size) if world.is_main else None
    run = world.share(run)
    model_config, training, data = resolved or _resolved(run, options, world.device, world.size)
    keep_freed_memory()
    described = describe_data(data, data.manifest["tokenizer"])
    config = {"model": model_config.as_dict(), "train": training.as_dict(), "data": described}
    model = _built(model_config, training, data)
    parameters = model.parameter_count()
    trainer = Trainer(
        path, model, training, data, world, described["unigram_entropy"], tensorboard, quiet, _observers(training)
    )
    if training.init_from is not None and not resume:
        _initial(training.init_from, trainer)
    if world.is_main:
        check_space(path, parameters, min(training.keep, training.steps // training.checkpoint_every + 1))
    with claimed(path, force, start=run is None) if world.is_main else nullcontext(), explained(path):
        saved = None
        if world.is_main:
            saved = checkpoint.newest(path / CHECKPOINTS, _say)
            if run is None:
                write_config(path, {**config, "environment": _environment(world)}, data.tokenizer().file)
        saved = world.share(saved)
        if saved is not None:
            if threads is None:
                torch.set_num_threads(saved.state["threads"])
            trainer.restore(saved)
        elif training.init_from is not None and resume:
            _initial(training.init_from, trainer)
        if not quiet and world.is_main:
            _announce(config, parameters, trainer)
        if trainer.step >= training.steps:
            if world.is_main:
                _say(f"{path} is finished: {training.steps} steps.")
            return FINISHED
        return trainer.fit()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _announce(resolved: dict[str, Any], parameters: int, trainer: Trainer) -> None:
    """The resolved config, as it is saved, and what follows from it."""
    print(files.dump(resolved).decode(), end="")
    print(
        f"{parameters:,} parameters, {trainer.config.accumulation(trainer.world.size)} micro-batches an "
        f"update, {trainer.config.steps * trainer.config.tokens_per_update:,} tokens, device {trainer.world.device}, "
        f"{torch.get_num_threads()} threads" + (f", going on after step {trainer.step}" if trainer.step else "")
    )
    sys.stdout.flush()


def rewrite(words: Sequence[str]) -> list[str]:
    """`--resume auto` is `--resume`: it already starts where there is nothing to go on with."""
    result: list[str] = []
    for word in words:
        if not (word == "auto" and result and result[-1] == "--resume"):
            result.append(word)
    return result
