"""`spheret plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

# tyro reads annotations from the module
import tyro

from spheret.flags import HELP, section_flags
from spheret.optim import OPTIMIZERS
from spheret.plan import cost, memory
from spheret.plan.cost import GPUS, PARALLEL, SIZES, Setup
from spheret.support.errors import unknown
from spheret.support.files import check_output_file
from spheret.support.machine import write_measurement
from spheret.support.ranges import check_above_zero, check_counts
from spheret.support.tables import print_whole

GROWTH = (8, 64, 1024)
BACKBONE = ("bias", "positions", "mlp", "norm", "qk_norm", "kv_heads", "head")
BackboneFlags = section_flags("model", {}, without=tuple(name for name in HELP["model"] if name not in BACKBONE))


class Needs(msgspec.Struct):
    """What a setup holds, computes and sends, and how long it takes. flops: of a step, on all GPUs."""

    bytes: dict[str, float]
    fits: bool
    flops: float
    sent: dict[str, float]
    compute_seconds: float
    network_seconds: float
    step_seconds: float
    hours: float


class Saved(msgspec.Struct):
    """The bytes that the paper's arithmetic would keep in addition, and those of a loss that holds its logits."""

    connections: float
    loss: float


class Fastest(msgspec.Struct):
    """The fastest setup that fits. waiting: the share of a step that it waits for the network."""

    parallel: str
    recompute: bool
    batch_size: int
    accumulation: int
    bytes: float
    step_seconds: float
    waiting: float
    hours: float


class GrowthRow(msgspec.Struct):
    """One size on so many GPUs. fastest: None if nothing fits."""

    size: str
    parameters: int
    gpus: int
    tokens_per_update: int
    fastest: Fastest | None


class PlanResult(msgspec.Struct):
    """What `--json` writes."""

    size: str
    gpus: int
    gpu: str
    parallel: str
    scheme: str
    precision: str
    optimizer: str
    batch_size: int
    accumulation: int
    tokens_per_update: int
    steps: int
    parameters: int
    plain: Needs
    recompute: Needs
    saved: Saved
    growth: list[GrowthRow]


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def plan_command(
    model: BackboneFlags,  # type: ignore[valid-type]
    size: str = "L",
    gpus: int = 8,
    gpu: str = "h100",
    parallel: str = "ddp",
    scheme: str = "proj-spheretnorm",
    batch_size: int = 16,
    tokens_per_update: int = 131_072,
    block: int = 1024,
    steps: int = 50_000,
    precision: str = "bf16",
    utilisation: float = 0.35,
    network_gbit: float = 400.0,
    optimizer: str = "adamw",
    json: Path | None = None,
) -> int:
    """Estimate the memory, computation, traffic and time of a training run, and how they grow.

    Args:
        model: options of the model.
        size: S, M, L, or 1.5B, 2.7B, 7B, or modern-S, modern-M, modern-L. A modern size sets the options of the model
            where they are not given.
        gpus: how many GPUs.
        gpu: a100, h100, h200, b200 or rtx4090, at their stated peak rates.
        parallel: ddp or fsdp.
        scheme: the connection's scheme; it decides how much memory a connection keeps.
        batch_size: sequences per GPU and micro-batch, at most.
        tokens_per_update: tokens per update, over all GPUs.
        block: tokens per sequence.
        steps: number of updates.
        precision: float32, or bf16 (autocast).
        utilisation: the share of the peak rate that a step reaches. It is an assumption; nothing is measured.
        network_gbit: gigabits per second and GPU between nodes.
        optimizer: adamw, or muon for the hidden matrices.
        json: also write the numbers here.
    """
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    if gpu not in GPUS:
        raise unknown("gpu", gpu, GPUS)
    if parallel not in PARALLEL:
        raise unknown("parallel", parallel, PARALLEL)
    if precision not in memory.PRECISIONS:
        raise unknown("precision", precision, memory.PRECISIONS)
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation must be a share of the peak rate in (0, 1], got {utilisation}.")
    check_above_zero("--network-gbit", network_gbit, most=1e9)
    check_counts(steps=steps, batch_size=batch_size, block=block, gpus=gpus, tokens_per_update=tokens_per_update)
    check_output_file("--json", json)
    if tokens_per_update < block or tokens_per_update % block:
        raise ValueError(f"tokens_per_update must be a multiple of block = {block}, got {tokens_per_update}.")
    config = cost.sized(size, scheme, block, **model)
    batch, accumulation = cost.split(tokens_per_update // block, gpus, batch_size)
    network = network_gbit * 1e9 / 8
    setup = Setup(
        config, GPUS[gpu], gpus, parallel, batch, accumulation, precision, False, utilisation, network, optimizer
    )  # fmt: skip
    recomputing = replace(setup, recompute=True)
    result = PlanResult(
        size, gpus, gpu, parallel, scheme, precision, optimizer, batch, accumulation, tokens_per_update, steps,
        memory.shape(config).parameters, _needs(setup, steps), _needs(recomputing, steps), _saved(setup),
        _growth(setup, batch_size, steps),
    )  # fmt: skip
    _print(result, setup)
    write_measurement(json, msgspec.to_builtins(result))
    return 0


def _needs(setup: Setup, steps: int) -> Needs:
    seconds = cost.step_seconds(setup)
    of_each = cost.step_flops(setup.config, setup.tokens, setup.recompute)
    return Needs(
        bytes=cost.bytes_held(setup),
        fits=cost.fits(setup),
        flops=setup.accumulation * setup.gpus * of_each + cost.optimizer_flops(setup.config, setup.optimizer),
        sent=cost.bytes_sent(setup),
        compute_seconds=cost.compute_seconds(setup),
        network_seconds=cost.network_seconds(setup),
        step_seconds=seconds,
        hours=seconds * steps / 3600,
    )


def _saved(setup: Setup) -> Saved:
    config, tokens, precision = setup.config, setup.tokens, setup.precision
    fused, paper = (sum(memory.connections(config, tokens, precision, name)) for name in (None, "reference"))
    return Saved(paper - fused, memory.full_logits(config, tokens, precision))


def _growth(setup: Setup, batch_size: int, steps: int) -> list[GrowthRow]:
    """One row per size and number of GPUs, all for the same total number of tokens."""
    rows, total = [], setup.tokens_per_update * steps
    for size in SIZES:
        config = cost.resized(size, setup.config)
        for gpus in GROWTH:
            sequences = setup.tokens_per_update // config.block
            # every GPU needs at least one sequence, so the update grows if it has fewer sequences than GPUs
            sequences = max(gpus, sequences - sequences % gpus)
            best = cost.choose(
                config, setup.gpu, gpus, sequences, batch_size, setup.precision, setup.utilisation, setup.network,
                setup.optimizer,
            )  # fmt: skip
            fastest = None if best is None else _fastest(best, total)
            parameters = memory.shape(config).parameters
            rows.append(GrowthRow(size, parameters, gpus, sequences * config.block, fastest))
    return rows


def _fastest(best: Setup, total: int) -> Fastest:
    """total: the tokens of the whole training."""
    seconds = cost.step_seconds(best)
    return Fastest(
        parallel=best.parallel,
        recompute=best.recompute,
        batch_size=best.batch,
        accumulation=best.accumulation,
        bytes=sum(cost.bytes_held(best).values()),
        step_seconds=seconds,
        waiting=1 - cost.compute_seconds(best) / seconds,
        hours=seconds * total / best.tokens_per_update / 3600,
    )


def _print(result: PlanResult, setup: Setup) -> None:
    from rich.console import Console
    from rich.table import Table

    console, columns = Console(), (result.plain, result.recompute)
    say = _say(console)
    say(
        f"{result.scheme} {result.size}, {result.parameters:,} parameters, on {result.gpus} x "
        f"{result.gpu} with {result.parallel}"
    )
    table = Table()
    table.add_column("GB per GPU", no_wrap=True)
    for title in ("without recompute", "with recompute"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in columns[0].bytes:
        table.add_row(name, *(f"{needs.bytes[name] / 1e9:.2f}" for needs in columns))
    table.add_row("total", *(f"{sum(needs.bytes.values()) / 1e9:.2f}" for needs in columns))
    table.add_row(f"fits in {setup.gpu.memory / 1e9:.0f} GB", *("yes" if needs.fits else "no" for needs in columns))
    table.add_row("PFLOP per step, all GPUs", *(f"{needs.flops / 1e15:.2f}" for needs in columns))
    for name in columns[0].sent:
        table.add_row(f"GB {name} per step and GPU", *(f"{needs.sent[name] / 1e9:.2f}" for needs in columns))
    for name, key in (("computing", "compute_seconds"), ("sending", "network_seconds"), ("per step", "step_seconds")):
        table.add_row(f"seconds {name}", *(f"{getattr(needs, key):.3f}" for needs in columns))
    table.add_row(f"hours for {result.steps:,} steps", *(f"{needs.hours:.1f}" for needs in columns))
    print_whole(console, table)
    kept = memory.activations(setup.config, setup.tokens, setup.precision)
    parts = ", ".join(
        f"{name} {getattr(kept, name) / 1e9:.2f}" for name in ("connections", "attention", "mlp", "ends")
    )
    say(
        f"{result.tokens_per_update:,} tokens per update: {result.gpus} GPUs x {result.accumulation} "
        f"micro-batches x {result.batch_size} sequences x {setup.config.block:,} tokens."
    )
    # FSDP gathers the weights in bfloat16, so autocast copies none
    copies = f", bfloat16 copies of weights {kept.copies / 1e9:.2f}" if setup.parallel == "ddp" else ""
    say(f"GB of activations kept for the backward: {parts}{copies}.")
    say(
        f"Saved: {result.saved.connections / 1e9:.2f} GB that the paper's arithmetic would keep in the "
        f"connections, and {result.saved.loss / 1e9:.2f} GB of logits."
    )
    say(_when_fsdp(result, setup))
    print_whole(console, _growth_table(Table(title=f"other sizes and numbers of {result.gpu}"), result.growth))
    say(
        "Each row is the fastest DDP setup that fits, or the fastest FSDP setup if no DDP setup fits. Batch is "
        "sequences per GPU and micro-batch x micro-batches per update. Wait is the share of a step spent waiting for "
        f"the network. Hours are for {setup.tokens_per_update * result.steps / 1e9:.2f} B tokens."
    )
    for line in _assumptions(setup):
        say(f"- {line}")


def _say(console: Any) -> Any:
    return lambda text: console.print(text, highlight=False, soft_wrap=True)


def _when_fsdp(result: PlanResult, setup: Setup) -> str:
    # weights, gradients and buckets, and the optimiser's moments
    held = 3 * memory.FLOAT + memory.optimizer_bytes(setup.config, setup.optimizer) / result.parameters
    most = cost.USABLE * setup.gpu.memory / held
    rule = (
        f"DDP holds {held:.0f} bytes per parameter on every GPU, so this GPU needs FSDP above {most / 1e9:.1f} B "
        f"parameters"
    )
    best = cost.choose(
        setup.config, setup.gpu, setup.gpus, setup.tokens_per_update // setup.config.block, setup.batch,
        setup.precision, setup.utilisation, setup.network, setup.optimizer,
    )  # fmt: skip
    if best is None:
        return f"{rule}. Here nothing fits: use more GPUs, or GPUs with more memory."
    mode = f"{best.parallel}, batch {best.batch}{', recompute' if best.recompute else ''}"
    return f"{rule}. The fastest setup here: {mode}."


def _growth_table(table: Any, rows: list[GrowthRow]) -> Any:
    for column in ("size", "GPUs", "mode", "batch", "tokens/update", "GB", "s/step", "wait", "hours"):
        table.add_column(column, justify="left" if column in ("size", "mode") else "right", no_wrap=True)
    for row in rows:
        start, best = [row.size, f"{row.gpus:,}"], row.fastest
        if best is None:
            table.add_row(*start, "does not fit", "", f"{row.tokens_per_update:,}", "", "", "", "")
            continue
        table.add_row(
            *start,
            best.parallel + (", recompute" if best.recompute else ""),
            f"{best.batch_size} x {best.accumulation}",
            f"{row.tokens_per_update:,}",
            f"{best.bytes / 1e9:.1f}",
            f"{best.step_seconds:.3f}",
            f"{best.waiting:.0%}",
            f"{best.hours:.2f}",
        )
    return table


def _assumptions(setup: Setup) -> list[str]:
    gpu, precision = setup.gpu, setup.precision
    return [
        f"rates: {getattr(gpu, precision) / 1e12:,.0f} TFLOP/s in {precision}, {gpu.memory / 1e9:.0f} GB, "
        f"{gpu.link / 1e9:.0f} GB/s within a node ({gpu.source}); {setup.network / 1e9:.0f} GB/s per GPU between "
        f"nodes of {cost.GPUS_PER_NODE} GPUs.",
        f"utilisation: {setup.utilisation:.0%} of the GPU's peak rate and {cost.LINK_UTILISATION:.0%} of a link's "
        "rate, both assumed. The first also covers the time of everything that is not a matrix product.",
        "sending: ring algorithms without latency. DDP's overlaps with the last backward, FSDP's with all computing.",
        f"memory: a GPU is full at {cost.USABLE:.0%}. Weights, gradients and moments are float32. Activations are "
        "what autograd keeps, with flash attention. DDP has PyTorch's buckets. FSDP gathers two branches at a time.",
        "FLOP: matrix products, with attention as a full square; the backward counts twice the forward. Those of "
        "Muon are counted. The GPUs share its matrices out.",
    ]
