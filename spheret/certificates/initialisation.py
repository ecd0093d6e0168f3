"""Untrained models: how depth changes the stream, its gradient and the condition number of the whole stack."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from spheret.analysis import figures
from spheret.analysis.sublayers import check_one_stream, differentiable, float64_twin, own_path, token_jacobians
from spheret.certificates.sublayer_verdicts import LOST, finite
from spheret.connections.parse import parse_schemes
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.probes import Sublayer, probe
from spheret.support import files
from spheret.support.documents import Record
from spheret.support.machine import check_bytes
from spheret.support.meter import Meter
from spheret.support.ranges import counts, whole_number
from spheret.support.tables import print_in_parts, terminal
from spheret.support.threads import few_threads

FILE, FIGURE, FORMAT = "initialisation.json", "initialisation.png", "spheret-initialisation"
VOCAB, TIME, TOKENS = 256, 32, 4
# a stream or a gradient that changes by more than this factor over the stack has exploded or vanished
FACTOR = 1e3
# a norm after the sum shrinks the directions that it removes to about its eps, 1e-5, of their length
_REMOVED = 1e-4


class StackRecord(Record):
    """An untrained model of some depth: see `at_start`. None is beyond float64."""

    scheme: str
    layers: int
    norm: float | None
    gradient: float | None
    condition: float | None
    removed: int


def at_start(
    scheme: str,
    layers: int,
    width: int,
    options: dict[str, Any] | None = None,
    device: torch.device | None = None,
    seed: int = 0,
) -> StackRecord:
    """Norms, gradients and the condition number of an untrained model of `layers` blocks, in float64.

    norm: |h| after the last sublayer, divided by |h| after the entry.
    gradient: |dloss/dh| at the entry, divided by its value after the last sublayer.
    condition: the condition number of the product of all sublayers' Jacobians on a token's own path, for the worst of
    a few tokens. It leaves out the directions that a norm after the sum removes in every update.
    removed: the number of these directions.
    """
    heads = next(h for h in (4, 2, 1) if width % h == 0)
    config = GPTConfig(
        layers=layers, heads=heads, width=width, block=TIME, vocab=VOCAB, scheme=scheme, scheme_options=options or {}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(config)
        ids = torch.randint(VOCAB, (1, TIME + 1))
    ids = ids.to(device)
    twin = float64_twin(model.to(device)).requires_grad_(True)
    records: list[Sublayer] = []
    with probe(twin, records.append):
        loss = twin(ids[:, :-1], ids[:, 1:])
    first, last = records[0].h, records[-1].out
    gradients = torch.autograd.grad(loss, [first, last])
    twin.requires_grad_(False)
    condition, removed = _conditioning(records)
    return StackRecord(
        scheme=scheme,
        layers=layers,
        norm=finite(_norm(last) / _norm(first)),
        gradient=finite(_norm(gradients[0]) / _norm(gradients[1])),
        condition=condition,
        removed=removed,
    )


def _norm(x: Tensor) -> float:
    return float(x.detach().norm(dim=-1).mean())


def _conditioning(records: list[Sublayer]) -> tuple[float | None, int]:
    """The condition number of the whole stack, and the number of directions that it leaves out."""
    device, width = records[0].h.device, records[0].h.shape[-1]
    positions = torch.arange(TOKENS, device=device) * TIME // TOKENS + TIME // TOKENS - 1
    G = torch.eye(width, dtype=torch.float64, device=device).expand(TOKENS, width, width)
    # Jacobians of single sublayers: the second one and those of the last block
    singles = []
    with differentiable():
        for s in records:
            h, x = s.h.detach(), s.branch_input.detach()
            detached = Sublayer(s.number, h, s.f.detach(), s.out.detach(), s.connection, s.branch, x)
            _, J = token_jacobians(detached, own_path(detached, positions), h[:, positions])
            # the first sublayer reads embeddings, which are so short that the norm's eps blurs what it removes
            if s.number == 2 or 1 < s.number >= len(records) - 1:
                singles.append(J)
            G = J @ G
            # only ratios matter, and a product of unit size cannot overflow
            G = G / torch.linalg.matrix_norm(G)[:, None, None]
    if not G.isfinite().all():
        return None, 0
    # a norm after the sum removes one or two directions in every update, and the same number in their product
    single = torch.linalg.svdvals(torch.stack(singles))
    removed = int((single < _REMOVED * single[..., :1]).sum(-1).max())
    values = torch.linalg.svdvals(G)
    ratio = values[:, 0] / values[:, width - 1 - removed]
    # float64 resolves no larger ratio
    resolved = ratio < 1 / (width * torch.finfo(torch.float64).eps)
    return (finite(float(ratio.max())) if resolved.all() else None), removed


# key in a row: title of its panel, its vertical axis, and what to look for
PANELS = {
    "norm": (
        "How much the stream grows with depth", "|h| at the end / at the entry",
        "a flat line near 1. Growth with depth makes late layers count for less.",
    ),
    "gradient": (
        "How much the gradient grows on its way", "|gradient| at the entry / at the end",
        "a flat line near 1. A rise explodes and a fall vanishes in deeper models.",
    ),
    "condition": (
        "How unevenly directions are treated", "condition number",
        "a flat line. Above 1e7 float32 loses a direction, and a line ends where it cannot be measured.",
    ),
}  # fmt: skip


def goes_deep(row: StackRecord) -> bool:
    """Whether norm and gradient change by less than FACTOR, and the condition number stays below float32's limit."""
    if row.norm is None or row.gradient is None or row.condition is None:
        return False
    return all(1 / FACTOR < change < FACTOR for change in (row.norm, row.gradient)) and row.condition < LOST


def parse_depths(text: str) -> list[int]:
    """The depths that --layers names: 4..512 doubles from 4 to 512; 4,6,8 is a list."""
    if ".." not in text:
        return counts("--layers", text)
    first, last = (whole_number("each end of --layers", word) for word in text.split("..", 1))
    if first > last:
        raise ValueError(f"--layers {text} holds no depth: give the smaller number first, as in 4..512.")
    return [first << k for k in range((last // first).bit_length())]


def compare(schemes: str, layers: str, width: int, directory: Path, device: torch.device | None = None) -> int:
    """Measure untrained models of every scheme at every depth; print the table, and write it with its figure."""
    asked, depths = parse_schemes(schemes), parse_depths(layers)
    choices = [choice for choice in asked if choice.build().one_stream]
    if not choices:
        check_one_stream(asked[0].build())
    files.check_results("--out", directory, FILE, FIGURE)
    # the weights in float32, and their twin in float64
    model = f"a model of {max(depths):,} layers of width {width:,}"
    check_bytes(12.0 * 12 * width**2 * max(depths), device or torch.device("cpu"), model, "take a smaller one")
    names = [choice.label for choice in choices]
    rows, done = [], 0
    with few_threads(width), Meter("certify") as meter:
        for choice in choices:
            for depth in depths:
                row = at_start(choice.name, depth, width, choice.options, device)
                rows.append(msgspec.structs.replace(row, scheme=choice.label))
                done += depth
                meter.show(f"{choice.label}, {depth} blocks", done / (len(choices) * sum(depths)))
    _print_table(names, depths, rows, width)
    if left := [choice.label for choice in asked if choice not in choices]:
        print(f"Left out, because they carry more than one stream: {', '.join(left)}.")
    directory.mkdir(parents=True, exist_ok=True)
    files.write_atomically(
        directory / FILE,
        files.dump({"format": FORMAT, "width": width, "tokens": TOKENS, "rows": msgspec.to_builtins(rows)}),
    )
    panels = [
        figures.Panel(
            title, "layers", y, look_for,
            {name: (depths, [getattr(row, key) for row in rows if row.scheme == name]) for name in names},
            log=True, doubling=True,
        )
        for key, (title, y, look_for) in PANELS.items()
    ]  # fmt: skip
    names_of_schemes = {choice.label: choice.name for choice in choices}
    figure = figures.lines(f"Untrained models of width {width}, by depth", panels, names_of_schemes)
    files.write_figure(directory / FIGURE, figure)
    print(f"Wrote {directory / FILE} and {FIGURE}.")
    return 0


def _print_table(names: list[str], depths: list[int], rows: list[StackRecord], width: int) -> None:
    table = []
    for name in names:
        own_rows = [row for row in rows if row.scheme == name]
        reached = 0
        for row in own_rows:
            if not goes_deep(row):
                break
            reached = row.layers
        last = own_rows[-1]
        limit = "not at all" if not reached else f"{reached}" + (" or more" if reached == depths[-1] else "")
        numbers = [_text(value) for value in (last.norm, last.gradient, last.condition)]
        table.append([name, *numbers, str(last.removed), limit])
    title = f"untrained models, width {width}: over a whole stack of {depths[-1]} blocks"
    columns = ["scheme", "|h| out/in", "|grad| in/out", "condition", "removed", "goes deep to"]
    print_in_parts(terminal(), title, columns, table, first=1, left=("scheme",))
    print(
        f"A stack goes deep while norm and gradient change by a factor of less than {FACTOR:g} and the condition "
        f"number stays below {LOST:.2g}. Above that, a matrix is singular in float32. '-' means beyond float64. "
        "removed: directions that every update removes; the condition number leaves them out."
    )


def _text(x: float | None) -> str:
    return "-" if x is None or math.isnan(x) else f"{x:.3g}"
