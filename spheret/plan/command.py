"""`spheret plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from spheret.plan import cost, memory
from spheret.plan.cost import GPUS, PARALLEL, SIZES, Setup
from spheret.support.errors import unknown
from spheret.support.machine import write_measurement

GROWTH = (8, 64, 1024)


def plan_command(
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
    json: Path | None = None,
) -> int:
    """Say what a training run will hold, compute and send, how long it takes, and how that grows.

    Args:
        size: S, M, L, or 1.5B, 2.7B, 7B.
        gpus: how many GPUs.
        gpu: a100, h100, h200, b200 or rtx4090, at their stated peak rates.
        parallel: ddp or fsdp.
        scheme: a name of SCHEMES; it decides what a connection keeps.
        batch_size: sequences that a GPU takes at a time, at most.
        tokens_per_update: tokens in an update, over all GPUs.
        block: tokens in a sequence.
        steps: updates.
        precision: bf16 (autocast) or float32.
        utilisation: the share of the peak rate that a step reaches; assumed, never measured here.
        network_gbit: gigabits a second between nodes, for each GPU.
        json: also write the numbers here.
    """
    if gpu not in GPUS:
        raise unknown("gpu", gpu, GPUS)
    if parallel not in PARALLEL:
        raise unknown("parallel", parallel, PARALLEL)
    if precision not in memory.PRECISIONS:
        raise unknown("precision", precision, memory.PRECISIONS)
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation is a share of the peak rate, in (0, 1], got {utilisation}.")
    if network_gbit <= 0 or steps < 1 or batch_size < 1 or block < 1:
        raise ValueError("network_gbit, steps, batch_size and block must be positive.")
    if tokens_per_update < block or tokens_per_update % block:
        raise ValueError(f"tokens_per_update must be a multiple of block = {block}, got {tokens_per_update}.")
    config = cost.sized(size, scheme, block)
    batch, accumulation = cost.split(tokens_per_update // block, gpus, batch_size)
    network = network_gbit * 1e9 / 8
    setup = Setup(
        config, GPUS[gpu], gpus, parallel, batch, accumulation, precision, False, utilisation, network
    )  # fmt: skip
    again = replace(setup, recompute=True)
    result = {
        "size": size, "gpus": gpus, "gpu": gpu, "parallel": parallel, "scheme": scheme, "precision": precision,
        "batch_size": batch, "accumulation": accumulation, "tokens_per_update": tokens_per_update, "steps": steps,
        "parameters": memory.shape(config).parameters,
        "plain": _numbers(setup, steps), "recompute": _numbers(again, steps), "saved": _saved(setup),
        "growth": _growth(setup, batch_size, steps),
    }  # fmt: skip
    _print(result, setup)
    write_measurement(json, result)
    return 0


def _numbers(setup: Setup, steps: int) -> dict[str, Any]:
    seconds = cost.step_seconds(setup)
    return {
        "bytes": cost.bytes_held(setup),
        "fits": cost.fits(setup),
        "flops": setup.accumulation * setup.gpus
        * cost.step_flops(setup.config, setup.tokens, setup.recompute),
        "sent": cost.bytes_sent(setup),
        "compute_seconds": cost.compute_seconds(setup),
        "network_seconds": cost.network_seconds(setup),
        "step_seconds": seconds,
        "hours": seconds * steps / 3600,
    }  # fmt: skip


def _saved(setup: Setup) -> dict[str, float]:
    """Bytes more that autograd would keep: with the paper's arithmetic, and with a loss that holds its logits."""
    config, tokens, precision = setup.config, setup.tokens, setup.precision
    ours, papers = (sum(memory.connections(config, tokens, precision, name)) for name in (None, "reference"))
    return {"connections": papers - ours, "loss": memory.full_logits(config, tokens, precision)}


def _growth(setup: Setup, batch_size: int, steps: int) -> list[dict[str, Any]]:
    """A row a size and number of GPUs, for as many tokens in all."""
    rows, total = [], setup.tokens_per_update * steps
    for size in SIZES:
        config = cost.sized(size, setup.config.scheme, setup.config.block)
        for gpus in GROWTH:
            sequences = setup.tokens_per_update // config.block
            # a GPU has a sequence at least, so the update grows where the paper's is too small
            sequences = max(gpus, sequences - sequences % gpus)
            best = cost.choose(
                config, setup.gpu, gpus, sequences, batch_size, setup.precision, setup.utilisation, setup.network
            )
            row: dict[str, Any] = {
                "size": size, "parameters": memory.shape(config).parameters, "gpus": gpus,
                "tokens_per_update": sequences * config.block,
            }  # fmt: skip
            if best is not None:
                seconds = cost.step_seconds(best)
                row |= {
                    "parallel": best.parallel, "recompute": best.recompute, "batch_size": best.batch,
                    "accumulation": best.accumulation, "bytes": sum(cost.bytes_held(best).values()),
                    "step_seconds": seconds, "waiting": 1 - cost.compute_seconds(best) / seconds,
                    "hours": seconds * total / best.tokens_per_update / 3600,
                }  # fmt: skip
            rows.append(row)
    return rows


def _print(result: dict[str, Any], setup: Setup) -> None:
    from rich.console import Console
    from rich.table import Table

    console, plain, again = Console(), result["plain"], result["recompute"]
    say = _say(console)
    say(
        f"{result['scheme']} {result['size']}, {result['parameters']:,} parameters, on {result['gpus']} x "
        f"{result['gpu']} with {result['parallel']}"
    )
    table = Table()
    for column in ("GB a GPU", "plain", "recompute"):
        table.add_column(column, justify="left" if column == "GB a GPU" else "right", no_wrap=True)
    for name in plain["bytes"]:
        table.add_row(name, *(f"{way['bytes'][name] / 1e9:.2f}" for way in (plain, again)))
    table.add_row("in all", *(f"{sum(way['bytes'].values()) / 1e9:.2f}" for way in (plain, again)))
    table.add_row(
        f"fits in {setup.gpu.memory / 1e9:.0f} GB", *("yes" if way["fits"] else "no" for way in (plain, again))
    )
    table.add_row("PFLOP a step, all GPUs", *(f"{way['flops'] / 1e15:.2f}" for way in (plain, again)))
    for name in plain["sent"]:
        table.add_row(f"GB {name} a step, a GPU", *(f"{way['sent'][name] / 1e9:.2f}" for way in (plain, again)))
    for name, key in (("computing", "compute_seconds"), ("sending", "network_seconds"), ("a step", "step_seconds")):
        table.add_row(f"seconds {name}", *(f"{way[key]:.3f}" for way in (plain, again)))
    table.add_row(f"hours for {result['steps']:,} steps", *(f"{way['hours']:.1f}" for way in (plain, again)))
    console.print(table)
    kept = memory.activations(setup.config, setup.tokens, setup.precision)
    parts = ", ".join(
        f"{name} {getattr(kept, name) / 1e9:.2f}" for name in ("connections", "attention", "mlp", "ends")
    )
    say(
        f"{result['tokens_per_update']:,} tokens an update: {result['gpus']} GPUs x {result['batch_size']} sequences "
        f"x {setup.config.block:,} x accumulation {result['accumulation']}."
    )
    say(f"Activations kept for the backward, GB: {parts}, bfloat16 copies of weights {kept.copies / 1e9:.2f}.")
    say(
        f"Not kept: {result['saved']['connections'] / 1e9:.2f} GB that the paper's arithmetic would keep at its "
        f"connections, and {result['saved']['loss'] / 1e9:.2f} GB of logits."
    )
    say(_when_fsdp(result, setup))
    console.print(_growth_table(Table(title=f"how it grows on {result['gpu']}"), result["growth"]))
    say(
        "DDP where it fits, and FSDP where it must be; batch x accumulation, and recompute, by what is fastest. "
        f"Hours for {setup.tokens_per_update * result['steps'] / 1e9:.2f} B tokens in all; waiting: for the network."
    )
    for line in _assumptions(setup):
        say(f"- {line}")


def _say(console: Any) -> Any:
    return lambda text: console.print(text, highlight=False, soft_wrap=True)


def _when_fsdp(result: dict[str, Any], setup: Setup) -> str:
    # weights, gradients, two moments and buckets
    most = cost.USABLE * setup.gpu.memory / (5 * memory.FLOAT)
    rule = f"DDP holds 20 bytes a parameter on every GPU, so beyond {most / 1e9:.1f} B parameters FSDP is necessary"
    best = cost.choose(
        setup.config, setup.gpu, setup.gpus, setup.tokens_per_update // setup.config.block, setup.batch,
        setup.precision, setup.utilisation, setup.network,
    )  # fmt: skip
    if best is None:
        return f"{rule}; here nothing fits: take more GPUs, or GPUs with more memory."
    how = f"{best.parallel}, batch {best.batch}{', recompute' if best.recompute else ''}"
    return f"{rule} on this GPU. Here: take {how}."


def _growth_table(table: Any, rows: list[dict[str, Any]]) -> Any:
    for column in ("size", "GPUs", "way", "batch", "tokens an update", "GB", "s a step", "waiting", "hours"):
        table.add_column(column, justify="left" if column in ("size", "way") else "right", no_wrap=True)
    for row in rows:
        start = [row["size"], f"{row['gpus']:,}"]
        if "parallel" not in row:
            table.add_row(*start, "does not fit", "", f"{row['tokens_per_update']:,}", "", "", "", "")
            continue
        table.add_row(
            *start,
            row["parallel"] + (", recompute" if row["recompute"] else ""),
            f"{row['batch_size']} x {row['accumulation']}",
            f"{row['tokens_per_update']:,}",
            f"{row['bytes'] / 1e9:.1f}",
            f"{row['step_seconds']:.3f}",
            f"{row['waiting']:.0%}",
            f"{row['hours']:.2f}",
        )
    return table


def _assumptions(setup: Setup) -> list[str]:
    gpu, precision = setup.gpu, setup.precision
    return [
        f"rates: {getattr(gpu, precision) / 1e12:,.0f} TFLOP/s in {precision}, {gpu.memory / 1e9:.0f} GB, "
        f"{gpu.link / 1e9:.0f} GB/s to the same node ({gpu.source}); {setup.network / 1e9:.0f} GB/s a GPU between "
        f"nodes of {cost.GPUS_A_NODE}.",
        f"utilisation: {setup.utilisation:.0%} of the peak rate and {cost.LINK_UTILISATION:.0%} of a link's, "
        "assumed; the time of everything that is not a matrix product is in there.",
        "sending: rings, without latency; DDP's hides behind the last backward, FSDP's behind all computing.",
        f"memory: a GPU is full at {cost.USABLE:.0%}; float32 weights, gradients and moments; activations as "
        "autograd keeps them, with flash attention; PyTorch's DDP buckets; FSDP gathers two branches at a time.",
        "FLOP: matrix products, attention as a full square, the backward twice the forward.",
    ]
