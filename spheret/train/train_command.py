"""`spheret train`: from flags to a run directory."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

# tyro reads annotations from the module
import tyro

from spheret.data import Data, open_named
from spheret.flags import SET_HELP, given, section_flags, shown
from spheret.model.gpt import GPT
from spheret.observe.outputs import check_tracker, open_tracker
from spheret.runs import checkpoint
from spheret.runs.checkpoint import Checkpoint
from spheret.runs.config import Given, RunConfig, differences, merge, read_config
from spheret.runs.cost import check_run, optimizer_flops, shape, step_bytes, step_flops
from spheret.runs.directory import claimed, existing
from spheret.runs.layout import CHECKPOINTS, CONFIG, METRICS, SAMPLE
from spheret.runs.metrics import whole_metrics
from spheret.runs.records import Environment, RunRecord
from spheret.runs.run import Run, describe_data, manifest_sha256, open_run, write_config
from spheret.support import machine
from spheret.support.allocator import keep_freed_memory
from spheret.support.errors import FINISHED
from spheret.support.machine import check_threads, most_threads
from spheret.support.ranges import bytes_in_words
from spheret.train.distributed import TorchrunWorld, World, join
from spheret.train.loop import Trainer
from spheret.train.recipes import SMALL, complete_for_data, rate_words
from spheret.train.sample import write_ending_sample
from spheret.train.state import check, load_weights, restore

ModelFlags = section_flags("model", SMALL.sections, size=True)
DataFlags = section_flags("data", SMALL.sections, size=True)
OptimisationFlags = section_flags("train", SMALL.sections, size=True)
EvaluationFlags = section_flags("evaluation", SMALL.sections, size=True)


@dataclass(frozen=True)
class TrainOptions:
    """Where a run is written, and what it runs on.

    Args:
        out: The run directory. Run the same command again to continue the run in it.
        config: A TOML or JSON file of settings, by section; flags win over it.
        resume: Take every setting that is not given from the run in --out.
        force: Remove the run in --out and start again.
        dry_run: Print parameters, FLOPs and the memory of a step, and stop. Nothing is written.
        device: cuda, mps or cpu.
        threads: CPU threads. A continued run keeps its number, because it decides the last bits.
        parallel: ddp or fsdp, for processes that torchrun starts.
        timeout: Seconds to wait for the other processes.
        ignore_memory: Start although the model and its batch need more memory than there is.
        logger: trackio or wandb: metrics and alarms go there too.
        quiet: Print no summary and no progress.
    """

    out: str
    config: Annotated[Path | None, shown("PATH", "none")] = None
    resume: bool = False
    force: bool = False
    dry_run: bool = False
    device: Annotated[str | None, shown("STR", "the first of cuda, mps, cpu that this machine has")] = None
    threads: Annotated[int | None, shown("INT", "torch's own")] = None
    parallel: Annotated[str | None, shown("STR", "ddp under torchrun")] = None
    timeout: int = 600
    ignore_memory: bool = False
    logger: Annotated[str | None, shown("STR", "none")] = None
    quiet: bool = False


@tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction)
def train(
    where: Annotated[TrainOptions, tyro.conf.FlagCreatePairsOff],
    model: ModelFlags,  # type: ignore[valid-type]
    data: DataFlags,  # type: ignore[valid-type]
    optimisation: OptimisationFlags,  # type: ignore[valid-type]
    evaluation: EvaluationFlags,  # type: ignore[valid-type]
    set: Annotated[tuple[str, ...], tyro.conf.arg(help=SET_HELP)] = (),
) -> int:
    """Train a GPT under any scheme. After a kill at any moment, the same command continues it bit for bit.

    Exit codes: 0 finished; 2 bad input, or a disk that failed; 3 stopped by a guard, because a loss or gradient is
    not finite or the run diverged; 130 and 143 stopped by Ctrl-C or SIGTERM, after saving.
    """
    settings = given(set, model=model, data=data, train=optimisation, evaluation=evaluation)
    if where.config is not None:
        settings = merge(read_config(where.config), settings)
    if where.threads is not None:
        torch.set_num_threads(check_threads("--threads", where.threads))
    if where.logger is not None:
        check_tracker(where.logger)
    world = join(where.device, where.parallel, where.timeout)
    try:
        return _train(world, where, settings)
    finally:
        world.close()


def _shards(world: World) -> int:
    """The number of processes that share one copy of the weights."""
    return world.size if isinstance(world, TorchrunWorld) and world.parallel == "fsdp" else 1


def _dry_run(run: Run | None, settings: Given, resume: bool, world: World) -> int:
    """Print what the run would cost. Data that is not prepared stays so: its tokenizer says the vocabulary."""
    if run is not None:
        settings = _settings_of(run, settings, resume)
    config = complete_for_data(settings, world.device.type, world.size)
    model, train, shards = config.model, config.train, _shards(world)
    flops = step_flops(model, train.tokens_per_update, model.recompute) + optimizer_flops(model, train.optimizer)
    parts = step_bytes(model, train.batch_size, train.precision, train.optimizer, shards)
    have = machine.memory_bytes(world.device)
    sizes = ", ".join(f"{name} {bytes_in_words(size)}" for name, size in parts.items())
    each = f" in each of {shards} processes, without what FSDP gathers" if shards > 1 else ""
    print(f"parameters: {shape(model).parameters:,}")
    print(f"FLOPs per token: {flops / train.tokens_per_update:.4g}, in matrix products of a whole update")
    print(f"memory of a step{each}: {bytes_in_words(sum(parts.values()))} ({sizes})")
    if have is not None:
        print(f"memory of {world.device}: {bytes_in_words(have)}")
    return FINISHED


def _resolve(
    run: Run | None, settings: Given, out: Path, resume: bool, world: World, ignore_memory: bool, quiet: bool
) -> tuple[RunConfig, Data]:
    """The config and the data. A run that continues must have the same config, apart from what may change."""
    if run is not None:
        settings = _settings_of(run, settings, resume)
    # wrong settings are found before a corpus is prepared
    config = complete_for_data(settings, world.device.type, world.size)
    check_run(config, world.device, ignore_memory, _shards(world))
    data = open_named(config.data.path, config.data.tokenizer, quiet or not world.is_main, out)
    if run is not None:
        changes = differences(run.settings, config)
        saved, sha256 = run.config.data.manifest_sha256, manifest_sha256(data)
        if saved != sha256:
            changes.append(f"data (the run has {saved!r}, asked for {sha256!r})")
        if changes:
            raise ValueError(
                f"{run.path} is a different run; these differ: {', '.join(changes)}. Give a different --out; or "
                "--resume to continue it with its own settings; or --force to remove it."
            )
    return config, data


def _settings_of(run: Run, settings: Given, resume: bool) -> Given:
    """The settings for a run that continues. With `resume`, settings that are not given come from the run."""
    own = run.settings
    if not resume:
        return settings
    if "data" not in settings and not Path(own.data.path).is_dir():
        raise FileNotFoundError(
            f"the data of {run.path} is no longer at {own.data.path}: give its place with --data."
        )
    return merge(own.as_dict(), settings)


def _initial_weights(source: str, trainer: Trainer) -> None:
    """Load the weights of another run, or of one checkpoint of it."""
    path = Path(source).expanduser()
    if path.parent.name == CHECKPOINTS:
        try:
            saved = checkpoint.verify(path)
        except checkpoint.Damaged as error:
            raise ValueError(f"train.init_from {source} is not a whole checkpoint, {error}: give another.") from None
        load_weights(trainer.model, saved)
    else:
        load_weights(trainer.model, open_run(path).checkpoint())


def _environment(world: World) -> Environment:
    return Environment(
        **machine.machine(),
        device=world.device.type,
        processes=world.size,
        parallel=world.parallel if isinstance(world, TorchrunWorld) else None,
        commit=machine.commit(),
        command=shlex.join(["spheret", *sys.argv[1:]]),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _train(world: World, where: TrainOptions, settings: Given) -> int:
    path = Path(where.out).expanduser()
    # the main process looks, and prepares a corpus, before the others do
    run = existing(path, where.resume, where.force) if world.is_main else None
    if where.dry_run:
        return _dry_run(run, settings, where.resume, world) if world.is_main else FINISHED
    asked = settings, path, where.resume, world, where.ignore_memory, where.quiet
    resolved = _resolve(run, *asked) if world.is_main else None
    run = world.share(run)
    config, data = resolved or _resolve(run, *asked)
    keep_freed_memory()
    described = describe_data(data)
    torch.manual_seed(config.train.seed)
    model = GPT(config.model, data.counts() if config.model.head_bias == "unigram" else None)
    parameters = model.parameter_count()
    # before the directory is claimed: --force removes a run only if all that the new one needs was found
    trainer = Trainer(
        path, model, config.train, config.evaluation, data, world, described.unigram_entropy, where.quiet
    )
    if config.train.init_from is not None and run is None:
        _initial_weights(config.train.init_from, trainer)
    record = RunRecord(
        model=config.model,
        train=config.train,
        evaluation=config.evaluation,
        data=described,
        environment=_environment(world),
    )
    with claimed(path, where.force, start=run is None) if world.is_main else nullcontext():
        saved = None
        if world.is_main:
            saved = checkpoint.newest(path / CHECKPOINTS, check=partial(check, trainer))
            if run is None:
                write_config(path, record, data.tokenizer().file)
        saved = world.share(saved)
        if saved is not None:
            if where.threads is None:
                _same_threads(saved)
            restore(trainer, saved)
        elif config.train.init_from is not None and run is not None:
            _initial_weights(config.train.init_from, trainer)
        if not where.quiet and world.is_main:
            found_rate = run is None and "size" not in settings and "lr" not in settings.get("train", {})
            _announce(path, config, data, parameters, trainer, found_rate)
        if trainer.step >= config.train.steps:
            if world.is_main:
                whole_metrics(path / METRICS, trainer.step)
                if not (path / SAMPLE).exists():
                    _write_sample(path, trainer, data, world)
                _print(f"{path} is finished: {config.train.steps} steps.")
            return FINISHED
        with _tracked(trainer, where.logger) if world.is_main else nullcontext():
            code = trainer.fit()
        if code == FINISHED and world.is_main:
            _write_sample(path, trainer, data, world)
        if code == FINISHED and not where.quiet and world.is_main:
            _conclude(path, trainer)
        return code


@contextmanager
def _tracked(trainer: Trainer, logger: str | None) -> Iterator[None]:
    """Within the block, the trainer sends its metrics to a run of a tracker, which goes on when the training does."""
    if logger is None:
        yield
        return
    # the hash tells runs in directories of one name apart, and a run from one that --force began again
    config = (trainer.path / CONFIG).read_bytes()
    name = f"{trainer.path.resolve().name}-{hashlib.sha256(config).hexdigest()[:8]}"
    trainer.tracker = open_tracker(logger, name, json.loads(config))
    try:
        yield
    finally:
        trainer.tracker.close()


def _write_sample(path: Path, trainer: Trainer, data: Data, world: World) -> None:
    """Write a short text of the trained model into the run."""
    # no process has all weights of a model that is sharded
    if not (isinstance(world, TorchrunWorld) and world.parallel == "fsdp"):
        write_ending_sample(path, trainer.model, data.tokenizer(), trainer.step)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _same_threads(saved: Checkpoint) -> None:
    """Take as many threads as the checkpoint was computed with, if this machine can run them."""
    threads, most = saved.state.training.threads if saved.state.training else 1, most_threads()
    if threads > most:
        _print(f"step-{saved.step} was computed with {threads} threads, here are {most}: the last bits differ.")
    torch.set_num_threads(min(threads, most))


def _announce(path: Path, config: RunConfig, data: Data, parameters: int, trainer: Trainer, found_rate: bool) -> None:
    """Print what is trained, on what, and where. The whole config is in config.json.

    found_rate: whether the learning rate comes from the studies.
    """
    model, steps, per_update = config.model, config.train.steps, config.train.tokens_per_update
    options = "".join(f":{name}={value}" for name, value in model.scheme_options.items())
    corpus, tokens, threads = data.manifest.corpus.name, steps * per_update, torch.get_num_threads()
    micro_batches = config.accumulation(trainer.world.size)
    print(
        f"model: {model.scheme}{options}, {model.layers} layers, width {model.width}, block {model.block}, "
        f"{parameters:,} parameters"
    )
    if found_rate:
        print(f"learning rate: {config.train.lr:g}, {rate_words(model)}")
    if model.norm is not None and not hasattr(model.build_scheme(), "norm"):
        print(f"norm: {model.scheme} has no norm that could be chosen, so model.norm {model.norm} changes nothing")
    print(
        f"data: {corpus} as {data.manifest.tokenizer.name}, {data.tokens('train'):,} training and "
        f"{data.tokens('val'):,} validation tokens; {tokens:,} tokens are {tokens / data.tokens('train'):.3g} epochs"
    )
    print(
        f"run: {steps:,} steps of {per_update:,} tokens in {micro_batches} micro-batch{'es' * (micro_batches > 1)}, "
        f"{trainer.world.device}, {threads} thread{'s' * (threads > 1)}, into {path}"
        + (f", continuing after step {trainer.step}" if trainer.step else ""),
        flush=True,
    )


def _conclude(path: Path, trainer: Trainer) -> None:
    """Print how a finished run ended, and what to do with it."""
    loss = f"loss {trainer.loss:.4f}" if trainer.loss is not None else "done"
    val = "" if trainer.val_loss is None else f", val {trainer.val_loss:.4f}"
    place = shlex.join([str(path)])
    end = f"{loss}{val} after {trainer.step:,} steps, in {path}{_judgement(trainer)}"
    print(f"{end}: spheret sample {place}, spheret report {place}")


def _judgement(trainer: Trainer) -> str:
    """What a user must know who reads only the loss."""
    end = trainer.loss if trainer.val_loss is None else trainer.val_loss
    frequencies, state = trainer.unigram_entropy, trainer.observer.judge.state
    if state.diverged is not None:
        return f" (it diverged at step {state.diverged:,}: the report says where it began and what to try)"
    if end is None or frequencies is None:
        return ""
    if end >= frequencies:
        return f" (nothing learned yet: the unigram entropy is {frequencies:.4f})"
    return " (its tokens collapsed: docs/collapse.md says why)" if state.collapsed else ""
