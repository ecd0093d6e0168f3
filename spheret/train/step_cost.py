"""The bare training step, and what it costs under several schemes, measured side by side in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from spheret.data import Data
from spheret.model.gpt import GPT
from spheret.optim import AdamW, build_optimizer
from spheret.runs.config import RunConfig
from spheret.support.allocator import keep_freed_memory
from spheret.support.timing import interleaved, interleaved_times, spread

# updates of each contestant that are timed, and the seconds that they may take together
FEWEST_ROUNDS, MOST_ROUNDS, SECONDS = 3, 7, 3.0


def share_parameters(model: nn.Module, other: nn.Module) -> None:
    """Let a model use the parameters of another where name and shape agree: many models need the memory of one."""
    theirs = dict(other.named_parameters())
    for name, parameter in list(model.named_parameters()):
        if name in theirs and theirs[name].shape == parameter.shape:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, theirs[name])


def training_step(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    precision: str = "float32",
    clip: float = 1.0,
) -> Callable[[], None]:
    """A function that makes one update from these micro-batches: forward, backward, clip, AdamW, zero_grad."""
    if isinstance(model, GPT):
        # models that share parameters would be constrained by each other's steps
        model.constrained_by_steps = False

    def run() -> None:
        for x, y in batches:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
                value = loss(x, y) / len(batches)
            value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if isinstance(model, GPT):
            model.constrain()

    return run


def measure_step_costs(
    configs: Mapping[str, RunConfig], data: Data, device: torch.device, threads: int
) -> tuple[dict[str, float], int, float]:
    """The median seconds of an update under each config, how many updates of each were timed, and their spread.

    The configs differ only in their schemes and optimisers. All models share their matrices and their optimisers. On
    a CPU the seconds are processor time, which other work on the machine changes least.
    """
    clocks = [time.process_time, time.perf_counter] if device.type == "cpu" else [time.perf_counter]
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            runs = _steps(configs, data, device)
            # the first update compiles kernels and takes memory; the second tells how many there is time for
            slowest = max(interleaved(runs, 1, warm_up=1).values())
            rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / slowest)))
            for clock in clocks:
                times = interleaved_times(runs, rounds, clock=clock, warm_up=0)
                medians = {name: statistics.median(values) for name, values in times.items()}
                # the processor's clock may be too coarse, e.g. while a timer of the process runs
                if min(medians.values()) > 0:
                    break
            return medians, rounds, max(map(spread, times.values()))
    finally:
        torch.set_num_threads(before)


def _steps(configs: Mapping[str, RunConfig], data: Data, device: torch.device) -> dict[str, Callable[[], None]]:
    first = next(iter(configs.values()))
    train, micro_batches = first.train, first.accumulation()
    loader = data.loader(first.model.block, train.batch_size, train.seed, 0, 1, micro_batches)
    batches = [(x.to(device), y.to(device)) for x, y in (loader.batch(0, micro) for micro in range(micro_batches))]
    models: dict[str, GPT] = {}
    for name, config in configs.items():
        counts = torch.ones(config.model.vocab) if config.model.head_bias == "unigram" else None
        model = GPT(config.model, counts).to(device).train()
        if models:
            share_parameters(model, next(iter(models.values())))
        models[name] = model
    # one optimiser of each kind: it skips parameters that have no gradient. Its small steps change no time
    every, optimizers = nn.ModuleList(models.values()), dict[str, AdamW]()
    for kind in {config.train.optimizer: None for config in configs.values()}:
        optimizers[kind] = build_optimizer(every, kind, 1e-6, train.weight_decay, train.betas, device)
    return {
        name: training_step(
            model,
            torch.compile(model) if train.compile else model,
            optimizers[configs[name].train.optimizer],
            batches,
            train.precision,
            train.clip,
        )
        for name, model in models.items()
    }
