"""`spheret bench step`: a whole training step of nanoGPT under every scheme, beside transformers' GPT-2."""

from __future__ import annotations

import json as jsons
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spheret.bench.timing import interleaved
from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.kernels import use
from spheret.model.gpt import GPT, PRESETS, GPTConfig
from spheret.model.loss import has_bfloat16
from spheret.optim import parameter_groups
from spheret.support.allocator import keep_freed_memory
from spheret.support.errors import need, unknown
from spheret.support.machine import write_measurement

RIVAL = "transformers GPT-2"
# the paper's arithmetic in place of our kernels
PAPERS_CODE = "proj-spheretnorm, the paper's code"
# bfloat16 only where the CPU has it: emulated, a step takes minutes
PRECISIONS = ("float32", "bfloat16") if has_bfloat16() else ("float32",)


def _ours(name: str, size: str, block: int, shared: GPT | None) -> GPT:
    """A model of that scheme; branches and embeddings are those of `shared`, for nine models would not fit."""
    scheme = "proj-spheretnorm" if name == PAPERS_CODE else name
    with torch.device("meta" if shared is not None else "cpu"):
        model = GPT(GPTConfig.preset(size, scheme=scheme, block=block))
    if shared is None:
        return model
    fresh = GPT(GPTConfig.preset(size, scheme=scheme, block=block, layers=1, vocab=2))
    model.tokens, model.positions = shared.tokens, shared.positions
    model.entry_norm, model.final_norm = fresh.entry_norm, fresh.final_norm
    made, width = model.scheme, model.config.width
    for index, (block_, other) in enumerate(zip(model.each_block(), shared.each_block(), strict=True)):
        block_.attention, block_.mlp = other.attention, other.mlp
        block_.attention_connection = made.connect(width, 2 * index + 1, 2 * model.config.layers)
        block_.mlp_connection = made.connect(width, 2 * index + 2, 2 * model.config.layers)
    return model


def _rival(size: str, block: int) -> nn.Module:
    transformers = need("transformers", "hub")
    layers, heads, width = PRESETS[size]
    config = transformers.GPT2Config(
        vocab_size=50304, n_positions=block, n_embd=width, n_layer=layers, n_head=heads, activation_function="gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def _loss(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if name == RIVAL:
        return nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    with use("reference" if name == PAPERS_CODE else None):
        return model(x, y)


def _step(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, precision: str
) -> Callable[[], object]:
    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = _loss(name, model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _batch(tokens: int, block: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(50257, (tokens // block, block + 1), generator=generator)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def peak_bytes(name: str, size: str, tokens: int, block: int, precision: str) -> int:
    """The most memory this process ever held, after two steps of one model; for a process of its own, on Linux."""
    model = _rival(size, block) if name == RIVAL else _ours(name, size, block, None)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)
    run = _step(name, model, optimizer, *_batch(tokens, block), precision)
    run()
    run()
    # getrusage would count what the parent held when it forked
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _peak_elsewhere(*arguments: Any) -> int:
    code = "import json, sys; from spheret.bench.step import peak_bytes; print(peak_bytes(*json.loads(sys.argv[1])))"
    command = [sys.executable, "-c", code, jsons.dumps(arguments)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(said.split()[-1])


def bench_step(
    size: str = "S",
    tokens: int = 1024,
    block: int = 512,
    schemes: str = "paper",
    repeats: int = 5,
    memory: bool = True,
    json: Path | None = None,
) -> int:
    """Time a full step (forward, backward, clip, AdamW) of every scheme on the CPU, in one process, interleaved.

    Args:
        size: S, M or L.
        tokens: tokens a step.
        block: tokens a sequence.
        schemes: "paper" for its nine, "all", or names separated by commas.
        repeats: rounds; the median is printed.
        memory: also the peak memory of each, measured in a process of its own.
        json: also write the table here.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    if size not in PRESETS:
        raise unknown("size", size, PRESETS)
    if tokens < block or tokens % block:
        raise ValueError(f"tokens must be a multiple of block, got {tokens} and {block}.")
    groups = {"paper": list(PAPER_SCHEMES), "all": list(SCHEMES)}
    names = groups.get(schemes) or schemes.split(",")
    for name in names:
        if name not in SCHEMES:
            raise unknown("scheme", name, [*SCHEMES, *groups])
    names = [*dict.fromkeys(["pre-ln", *names]), PAPERS_CODE, RIVAL]
    keep_freed_memory()
    shared = _ours("pre-ln", size, block, None)
    models: dict[str, nn.Module] = {"pre-ln": shared}
    models |= {name: _ours(name, size, block, shared) for name in names if name not in ("pre-ln", RIVAL)}
    models[RIVAL] = _rival(size, block)
    # one optimiser for all: it passes over whatever has no gradient in a step
    every = nn.ModuleList(models.values())
    optimizer = torch.optim.AdamW(parameter_groups(every, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)
    x, y = _batch(tokens, block)
    console, table = Console(), []
    with Progress(console=console, transient=True) as bar:
        rounds = bar.add_task("steps", total=len(names) * len(PRECISIONS) * (repeats + 2))
        seconds = {}
        for precision in PRECISIONS:
            runs = {name: _step(name, models[name], optimizer, x, y, precision) for name in names}
            seconds[precision] = interleaved(runs, repeats, lambda: bar.advance(rounds))
        peaks = bar.add_task("memory", total=len(names) * len(PRECISIONS), visible=memory)
        for name in names:
            row: dict[str, Any] = {"name": name}
            for precision in PRECISIONS:
                took = seconds[precision]
                row[precision] = {
                    "tokens/s": tokens / took[name],
                    "x pre-ln": took[name] / took["pre-ln"],
                    "GB": _peak_elsewhere(name, size, tokens, block, precision) / 1e9 if memory else None,
                }
                bar.advance(peaks)
            table.append(row)
    shown = Table(title=f"nanoGPT {size}, {tokens} tokens in sequences of {block}, {torch.get_num_threads()} threads")
    shown.add_column("", no_wrap=True)
    for precision in PRECISIONS:
        for column in (f"{precision[:7]} tok/s", "x pre-ln", "GB"):
            shown.add_column(column, justify="right")
    for row in table:
        cells = []
        for precision in PRECISIONS:
            cell = row[precision]
            cells += [
                f"{cell['tokens/s']:.0f}",
                f"{cell['x pre-ln']:.3f}",
                f"{cell['GB']:.2f}" if memory else "not run",
            ]
        shown.add_row(row["name"], *cells)
    console.print(shown)
    console.print("x pre-ln: the time of a step over that of Pre-LN. Medians of interleaved steps.")
    if "bfloat16" not in PRECISIONS:
        console.print("bfloat16: not run, this CPU has no bfloat16 arithmetic.")
    write_measurement(json, {"size": size, "tokens": tokens, "block": block, "repeats": repeats, "table": table})
    return 0
