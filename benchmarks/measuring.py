"""What all benchmarks share: flags, medians of interleaved rounds, tables, and JSON with the machine."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from spheret.cli import parse
from spheret.model.gpt import GPT
from spheret.optim import parameter_groups
from spheret.support.allocator import keep_freed_memory
from spheret.support.cache import keep_libraries_inside
from spheret.support.errors import explanation, need, one_line
from spheret.support.files import check_output_file, write_atomically
from spheret.support.machine import machine, resolve_device
from spheret.support.meter import Meter
from spheret.support.ranges import check_counts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# rounds before the first one that counts
WARM_UP = 2


class Comparison(NamedTuple):
    """A row of the table of `make bench`: seconds of ours, and of the rival if there is one."""

    what: str
    ours: float
    rival: float | None = None


def run(main: Callable[..., None], words: Sequence[str] | None = None) -> None:
    """Call a benchmark with flags, by default this process's. Bad input ends it with one sentence."""
    if words is None:
        # libraries that are imported later write into the cache of spheret
        keep_libraries_inside()
    program = _program(main.__code__.co_filename)
    try:
        parse(main, program, sys.argv[1:] if words is None else words)()
    except Exception as error:
        sentence = explanation(error)
        if sentence is None:
            raise
        raise SystemExit(f"{program}: {one_line(sentence)}") from None


def _program(path: str) -> str:
    return f"python benchmarks/{Path(path).name}"


def begin(json: Path | None, device: str | None = None, **counts: int) -> torch.device:
    """Check the flags that the benchmarks share, and return the device. From now on freed memory is kept.

    counts: flags that are at least 1.
    """
    check_counts(**counts)
    check_output_file("--json", json)
    place = resolve_device(device)
    keep_freed_memory()
    return place


def conditions(place: torch.device) -> str:
    """The end of a table's title: the device and the threads."""
    return f"{place}, {torch.get_num_threads()} threads"


def llama(
    layers: int, heads: int, width: int, hidden: int, block: int, vocabulary: int, **options: Any
) -> PreTrainedModel:
    """transformers' Llama with random weights, always the same ones, in training mode."""
    transformers = need("transformers", "hub")
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=block, use_cache=False, **options,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = transformers.LlamaForCausalLM(config).train()
        return model


def next_token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a model of transformers."""
    return nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the numbers of a benchmark as JSON, with its command and the machine; nothing happens without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"command": " ".join([_program(sys.argv[0]), *sys.argv[1:]]), **machine(), **result}
        write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")


def medians(
    title: str, contestants: Mapping[str, Callable[[], object]], repeats: int, cpu_time: bool = False
) -> dict[str, float]:
    """The median seconds of each contestant over interleaved rounds, with the progress on stderr.

    cpu_time: measure the CPU time of this process instead of the wall clock.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    with Meter(title) as meter:
        tick = counter(meter, len(contestants) * (repeats + WARM_UP), "runs")
        return interleaved(contestants, repeats, tick, clock)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size, by least squares: 1 is linear growth."""
    x, y = ([math.log(value) for value in values] for values in (sizes, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def check_sizes(**sizes: tuple[int, ...]) -> None:
    """End the program unless each flag has the sizes that an exponent needs."""
    for name, values in sizes.items():
        if len(set(values)) < 2 or min(values) < 1:
            raise SystemExit(f"--{name} must be two or more different positive numbers, got {values}.")


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimiser of a timed step."""
    return torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column has names and whose others have numbers."""
    # not needed by the processes that measure their memory
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = WARM_UP,
) -> dict[str, float]:
    """The median seconds of each contestant over the rounds after the warm-up.

    Every round runs all contestants once. Each round starts with the next one, so that none is always first.

    tick: called after each run of a contestant: (repeats + warm_up) times per contestant.
    """
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, repeats):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            _synchronize()
            start = clock()
            contestants[name]()
            _synchronize()
            if turn >= 0:
                times[name].append(clock() - start)
            tick()
    return {name: statistics.median(values) for name, values in times.items()}


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def counter(meter: Meter, total: int, unit: str) -> Callable[[], None]:
    """A function to call after every part of so many: "3 of 24 runs"."""
    numbers = iter(range(1, total + 1))

    def tick() -> None:
        done = next(numbers)
        meter.show(f"{done} of {total} {unit}", done / total)

    return tick


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
