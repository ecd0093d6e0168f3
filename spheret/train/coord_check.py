"""`spheret coord-check`: does a learning rate carry over to other widths and depths? One picture and one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spheret.connections.parse import parse_schemes
from spheret.optim import OPTIMIZERS
from spheret.optim.base_sizes import PARAMETRIZATIONS, check_scheme
from spheret.optim.coordinates import LOGITS, Coordinates, Setting, as_dict, powers, sweep, verdict
from spheret.plan.fits import check_training
from spheret.support import files
from spheret.support.errors import unknown
from spheret.support.figure_style import (
    PALETTE,
    WIDTH,
    Drawing,
    axes_grid,
    legend_below,
    own_style,
    render,
    spanned_log,
)
from spheret.support.machine import write_measurement
from spheret.support.meter import Meter
from spheret.support.ranges import check_above_zero, check_counts, counts
from spheret.support.threads import few_threads

RESULT, FIGURE = "coord-check.json", "coord-check.png"
TITLES = {"states": "size of the state, over the entry's", "updates": "change by the updates"}
# an axis shows at least this factor between its ends
LEAST_SPAN = 10


def coord_check(
    scheme: str = "pre-ln",
    parametrization: str = "completep",
    optimizer: str = "adamw",
    widths: str = "32,64,128,256",
    layers: str = "2,4,8,16",
    lr: float = 1e-3,
    steps: int = 4,
    seeds: int = 3,
    batch_size: int = 4,
    block: int = 32,
    out: str = "runs/coord-check",
) -> int:
    """Train small models for a few updates, and measure how much the updates change every part of them.

    If a learning rate carries over to other sizes, these changes do not depend on the size. The smallest width and
    number of layers are the base of the parametrization. The figure and the numbers are written to --out.

    Args:
        scheme: a scheme; scheme:option=value sets an option.
        parametrization: standard, mup or completep.
        optimizer: adamw, or muon for the hidden matrices.
        widths: widths with the smallest number of layers, separated by commas.
        layers: numbers of blocks with the smallest width, separated by commas.
        lr: learning rate of the base model.
        steps: updates, all on one batch.
        seeds: models per size, of which the geometric mean counts.
        batch_size: sequences per update.
        block: tokens per sequence.
        out: directory for coord-check.json and coord-check.png.
    """
    check_counts(steps=steps, seeds=seeds, batch_size=batch_size, block=block)
    check_above_zero("--lr", lr)
    for flag, value, known in (
        ("optimizer", optimizer, OPTIMIZERS), ("parametrization", parametrization, PARAMETRIZATIONS),
    ):  # fmt: skip
        if value not in known:
            raise unknown(flag, value, known)
    choices = parse_schemes(scheme)
    if len(choices) != 1:
        raise ValueError(f"--scheme takes one scheme, got {len(choices)}: check them one by one.")
    if choices[0].options.get("prores") is not None:
        raise ValueError(
            f"--scheme {scheme} warms up its branches by prores, and a check has few updates: leave prores out."
        )
    wide, deep = _sizes("widths", widths), _sizes("layers", layers)
    if odd := [number for number in deep if number % 2]:
        # places along the depth would lie between two sublayers
        raise ValueError(
            f"--layers {layers} has {odd[0]}, and a stream is looked at after each quarter of its depth: give even "
            "numbers."
        )
    directory = Path(out).expanduser()
    files.check_results("--out", directory, RESULT, FIGURE)
    setting = Setting(
        choices[0], parametrization, optimizer, lr, steps, batch_size, block, seeds, wide[0], deep[0]
    )  # fmt: skip
    sizes = {"width": [(width, deep[0]) for width in wide], "layers": [(wide[0], depth) for depth in deep]}
    for width, depth in (sizes["width"][-1], sizes["layers"][-1]):
        # the smallest first: it has the scheme's own errors
        check_scheme(parametrization, setting.shape(wide[0], deep[0]))
        check_training(setting.shape(width, depth), batch_size * block, "float32", torch.device("cpu"))
    with few_threads(wide[0]), Meter("coord-check") as meter:
        tick = meter.counter(seeds * (len(wide) + len(deep)), "models")
        rows = {size: sweep(setting, shapes, tick) for size, shapes in sizes.items()}
    found = {size: (each, powers(each, size)) for size, each in rows.items()}
    sentence = verdict(setting, found)
    directory.mkdir(parents=True, exist_ok=True)
    result = {size: as_dict(*each) for size, each in found.items()}
    write_measurement(directory / RESULT, {"verdict": sentence, "setting": _described(setting), **result})
    files.write_figure(directory / FIGURE, draw(sentence, rows).png)
    print(sentence)
    print(f"Wrote {directory / RESULT} and {FIGURE}.")
    return 0


def _sizes(name: str, text: str) -> list[int]:
    numbers = sorted(set(counts(f"--{name}", text)))
    if len(numbers) < 2:
        raise ValueError(f"--{name} must be at least two different positive numbers with commas, got {text!r}.")
    return numbers


def _described(setting: Setting) -> dict[str, Any]:
    return {**vars(setting), "choice": setting.choice.label}


def draw(sentence: str, rows: Mapping[str, Sequence[Coordinates]]) -> Drawing:
    """States and updates, over widths and over depths, one line per place along the depth."""
    from matplotlib.ticker import NullLocator

    with own_style():
        # one scale for both sizes, so that what is flat looks flat
        figure, grid = axes_grid(2, 2, (WIDTH, 6.4), sharey="col")
        for axes_row, (size, measured) in zip(grid, rows.items(), strict=True):
            sizes = [getattr(row, size) for row in measured]
            for axes, (part, title) in zip(axes_row, TITLES.items(), strict=True):
                for number, name in enumerate(getattr(measured[0], part)):
                    values = [getattr(row, part)[name] for row in measured]
                    dashes = "--" if name == LOGITS else "-"
                    axes.loglog(sizes, values, dashes, marker="o", color=PALETTE[number][0], label=name)
                axes.set(xlabel=size, title=title)
                axes.set_xticks(sizes, labels=map(str, sizes))
                axes.xaxis.set_minor_locator(NullLocator())
        for axes in grid[0]:
            low, high = axes.get_ylim()
            axes.set_ylim(*spanned_log(low, high, LEAST_SPAN))
        lines, labels = grid[0][1].get_legend_handles_labels()
        legend_below(figure, lines, labels, title="place along the depth")
        return render("coord-check", sentence, figure)
