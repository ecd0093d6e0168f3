"""Schemes before any training: what depth does to the stream, its gradient and the conditioning of the whole."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.analysis import figures
from spheret.analysis.sublayer_verdicts import LOST, finite
from spheret.analysis.sublayers import differentiable, float64_twin, own_path, token_jacobians
from spheret.analysis.threads import few_threads
from spheret.connections import SCHEMES
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.probes import Sublayer, probe
from spheret.support import files
from spheret.support.errors import unknown

FILE, FIGURE = "initialisation.json", "initialisation.png"
VOCAB, TIME, TOKENS = 256, 32, 4
# a stream or a gradient that changes by more than this over the stack has exploded or vanished
FACTOR = 1e3
# the share of a direction that a norm leaves of its input's length: about its eps, 1e-5
_VANISHED = 1e-4


def at_start(scheme: str, layers: int, width: int, seed: int = 0) -> dict[str, Any]:
    """Norms, gradients and conditioning of an untrained model of `layers` blocks, in float64.

    norm: |h| after the last sublayer over |h| after the entry.
    gradient: |dloss/dh| at the entry over that at the end.
    condition: of the product of the Jacobians of all sublayers on a token's own path, the worst of a few tokens; the
    directions that a norm after the sum takes out of every update are not counted, and `removed` says how many.
    """
    heads = next(h for h in (4, 2, 1) if width % h == 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(layers=layers, heads=heads, width=width, block=TIME, vocab=VOCAB, scheme=scheme))
        ids = torch.randint(VOCAB, (1, TIME + 1))
    twin = float64_twin(model).requires_grad_(True)
    records: list[Sublayer] = []
    with probe(twin, records.append):
        loss = twin(ids[:, :-1], ids[:, 1:])
    first, last = records[0].h, records[-1].out
    gradients = torch.autograd.grad(loss, [first, last])
    norms, slopes = (_norm(last) / _norm(first), _norm(gradients[0]) / _norm(gradients[1]))
    twin.requires_grad_(False)
    return {
        "scheme": scheme,
        "layers": layers,
        "loss": finite(float(loss.detach())),
        "norm": finite(norms),
        "gradient": finite(slopes),
        **_conditioning(records),
    }


def _norm(x: Tensor) -> float:
    return float(x.detach().norm(dim=-1).mean())


def _conditioning(records: list[Sublayer]) -> dict[str, Any]:
    """sigma_max (its logarithm, for it may be any number) and the condition number of the whole stack."""
    positions = torch.arange(TOKENS) * TIME // TOKENS + TIME // TOKENS - 1
    width = records[0].h.shape[-1]
    G = torch.eye(width, dtype=torch.float64).expand(TOKENS, width, width)
    start, scale = G, torch.zeros(TOKENS, dtype=torch.float64)
    with differentiable():
        for s in records:
            h, x = s.h.detach(), s.branch_input.detach()
            held = Sublayer(s.number, h, s.f.detach(), s.out.detach(), s.connection, s.branch, x)
            _, J = token_jacobians(held, own_path(held, positions), h[:, positions])
            # the first one sees embeddings, too short for the norm to be sharp
            start = J if s.number == 2 else start
            G = J @ G
            size = torch.linalg.matrix_norm(G)
            G, scale = G / size[:, None, None], scale + size.log()
    if not G.isfinite().all():
        return {"log_sigma_max": None, "condition": None, "removed": 0}
    # a norm after the sum takes a direction or two out of every update, the same number out of all of them together
    alone = torch.linalg.svdvals(torch.stack([start, J]))
    removed = int((alone < _VANISHED * alone[..., :1]).sum(-1).max())
    values = torch.linalg.svdvals(G)
    ratio = values[:, 0] / values[:, width - 1 - removed]
    # float64 holds no more than this of a ratio
    known = ratio < 1 / (width * torch.finfo(torch.float64).eps)
    return {
        "log_sigma_max": finite(float((scale + values[:, 0].log()).max())),
        "condition": finite(float(ratio.max())) if known.all() else None,
        "removed": removed,
    }


def goes_deep(row: dict[str, Any]) -> bool:
    """Whether such a stack still carries a signal forwards, a gradient back, and both in every direction."""
    return all(row[name] is not None and 1 / FACTOR < row[name] < FACTOR for name in ("norm", "gradient")) and bool(
        row["condition"] is not None and row["condition"] < LOST
    )


def depths(text: str) -> list[int]:
    """4..512 doubles from 4 to 512; 4,6,8 is a list."""
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split("..", 1))
            found = []
            while 0 < low <= high:
                found.append(low)
                low *= 2
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"layers must be like 4..512 (doubling), 4,6,8 or one number, got {text!r}.")
    return found


def compare(schemes: str, layers: str, width: int, directory: Path) -> int:
    """The table and the figure of some schemes against depth."""
    from rich.console import Console
    from rich.table import Table

    names = list(SCHEMES) if schemes == "all" else schemes.split(",")
    for name in names:
        if name not in SCHEMES:
            raise unknown("scheme", name, [*SCHEMES, "all"])
    blocks = depths(layers)
    rows = []
    with few_threads(width):
        for name in names:
            for depth in blocks:
                rows.append(at_start(name, depth, width))
            print(f"{name}: {' '.join(map(str, blocks))} blocks done", file=sys.stderr, flush=True)
    table = Table(title=f"before training, {width} wide: over a whole stack of {blocks[-1]} blocks")
    for column in ("scheme", "|h| out/in", "|grad| in/out", "condition", "removed", "goes deep to"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    for name in names:
        mine = [row for row in rows if row["scheme"] == name]
        reached = 0
        for row in mine:
            if not goes_deep(row):
                break
            reached = row["layers"]
        last = mine[-1]
        said = "not at all" if not reached else f"{reached}" + (" or more" if reached == blocks[-1] else "")
        numbers = [_text(last[key]) for key in ("norm", "gradient", "condition")]
        table.add_row(name, *numbers, str(last["removed"]), said)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    print(
        f"A stack goes deep while norms and gradients change by less than {FACTOR:g} and its condition number stays "
        f"below {LOST:.2g}, where float32 calls it singular; '-' is beyond float64. Directions that every update "
        f"removes are not in the condition number."
    )
    directory.mkdir(parents=True, exist_ok=True)
    files.write_atomically(directory / FILE, files.dump({"width": width, "tokens": TOKENS, "rows": rows}))
    panels: dict[str, dict[str, figures.Series]] = {
        quantity: {name: (blocks, [row[key] for row in rows if row["scheme"] == name]) for name in names}
        for quantity, key in (
            ("|h| at the end over the entry", "norm"),
            ("|gradient| at the entry over the end", "gradient"),
            ("condition number", "condition"),
        )
    }
    figure = figures.lines(f"before training, {width} wide", panels, "blocks", log=tuple(panels), logx=True)
    files.write_atomically(directory / FIGURE, figure)
    print(f"{directory / FILE} and {FIGURE}")
    return 0


def _text(x: float | None) -> str:
    return "-" if x is None or math.isnan(x) else f"{x:.3g}"
