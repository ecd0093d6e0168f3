"""`spheret explore`: one offline page that shows turning beside adding, and lets retractions be tried by hand.

The page has no formula of a retraction or of a schedule of its own, except p arctan(beta/p) for its slider of p. It
holds samples of every row of RETRACTIONS and SCHEDULES, taken here, so that a new row is on it at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from spheret.analysis.inputs import float64_device
from spheret.analysis.step_lengths import BIN_EDGES, RunSteps, run_steps
from spheret.data import refuse_output_among_text
from spheret.lab.runs import find_runs
from spheret.retractions import RETRACTIONS, Retraction, angular
from spheret.runs.run import Run, open_run
from spheret.schedules import SCHEDULES, factor
from spheret.support import files
from spheret.support.figure_style import PALETTE
from spheret.support.ranges import check_counts
from spheret.support.templates import environment, script_hashes

FOLDER = Path(__file__).parent / "explorer"
TEMPLATE, STYLE, SCRIPT = "explorer.html.jinja", "explorer.css", "explorer.js"
# by which an earlier explorer is known
MARK = b'<meta name="generator" content="spheret explore">'
# the longest step of the page
LARGEST_BETA = BIN_EDGES[-1]
# positions of the slider: position k is p = k/(P_POSITIONS - k). 200 is 1/2, 300 is 1, 400 is 2, 600 is infinity
P_POSITIONS = 600
# the depths of the budget, in layers of two sublayers
LAYERS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
# the sublayers of the picture on which adding is compared with turning, and the dimensions of its states
SUBLAYERS, DIMENSIONS = 24, 64
# places in PALETTE. Adding and the first four rows of RETRACTIONS have the colours of their schemes in all figures.
# No schedule has one of these. Further rows have the colours of the first ones and other dashes
COLOURS = {"adding": (0,), "retraction": (6, 7, 8, 5), "schedule": (1, 3, 4, 2)}
# on a light and on a dark page. Controls and the steps of runs are grey, so that a colour is a line's
THEME = {
    "paper": ("#f5f6f8", "#0f1216"),
    "card": ("#ffffff", "#171b21"),
    "ink": ("#1c2128", "#e7eaee"),
    "muted": ("#59626e", "#a3adb9"),
    "grid": ("#e3e6ea", "#2a3038"),
    "edge": ("#d9dde3", "#2d343d"),
    "focus": ("#0b57d0", "#8ab4f8"),
    "sphere": ("#f0f4fa", "#1c232d"),
    "steps": ("#3f4854", "#c3ccd6"),
}
# of an interpolated angle, in radians
_ERROR = 1e-8
_DIGITS = 12


def _colours() -> str:
    """The colours of the page as CSS variables, for light and dark. The theme button puts data-theme on the root."""
    lines = {
        f"{kind}-{index}": PALETTE[place] for kind, places in COLOURS.items() for index, place in enumerate(places)
    }
    light, dark = (
        f"color-scheme: {name}; " + " ".join(f"--{key}: {pair[page]};" for key, pair in {**THEME, **lines}.items())
        for page, name in enumerate(("light", "dark"))
    )
    return (
        f":root {{ {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}\n"
        f"@media screen {{ :root[data-theme=dark] {{ {dark} }} }}\n"
    )


def _angles(row: Retraction, beta: Tensor) -> Tensor:
    return row.angle(beta).double()


def _cubic(values: Tensor, t: Tensor) -> Tensor:
    """The cubic through values (n, 4) at t = 0, 1/3, 2/3, 1, at the places t: (n, places)."""
    u = 3 * t
    weights = torch.stack(
        [
            -(u - 1) * (u - 2) * (u - 3) / 6,
            u * (u - 2) * (u - 3) / 2,
            -u * (u - 1) * (u - 3) / 2,
            u * (u - 1) * (u - 2) / 6,
        ]
    )
    return values @ weights


def angle_pieces(row: Retraction) -> tuple[list[float], list[float]]:
    """theta on [0, LARGEST_BETA] as cubic pieces: their ends, and theta at four places of each piece.

    The places are the start, a third, two thirds, and the end, which is the start of the next piece. A piece is
    halved until the cubic has an error below `_ERROR`. So a row may have any slope.
    """
    nodes = torch.arange(4, dtype=torch.float64) / 3
    probes = torch.arange(1, 18, dtype=torch.float64) / 18
    # an angle has a bend where its formula ends
    ends = sorted({0.0, min(row.largest_step, LARGEST_BETA), LARGEST_BETA})
    pieces = torch.tensor(list(pairwise(ends)), dtype=torch.float64)
    done: list[list[float]] = []
    while len(pieces):
        start, width = pieces[:, :1], pieces[:, 1:] - pieces[:, :1]
        values = _angles(row, start + width * nodes)
        error = (_cubic(values, probes) - _angles(row, start + width * probes)).abs().amax(-1)
        # at a vertical slope the pieces end at the resolution of beta
        fine = (error < _ERROR) | (width.squeeze(-1) < 1e-13)
        done += torch.cat([start, values], -1)[fine].tolist()
        middle = start + width / 2
        pieces = torch.cat([torch.cat([start, middle], -1)[~fine], torch.cat([middle, start + width], -1)[~fine]])
    done.sort()
    last = float(_angles(row, torch.tensor([LARGEST_BETA], dtype=torch.float64)))
    starts = [piece[0] for piece in done]
    return [*starts, LARGEST_BETA], [_short(x) for piece in done for x in piece[1:4]] + [_short(last)]


def _short(x: float) -> float:
    """x to 12 digits: shorter in the page, and the same on every machine."""
    return float(f"{x:.{_DIGITS}g}")


def _family_caps() -> list[list[float | None]]:
    """The automatic cap along the slider of p: (first position, cap). At 0 nothing turns and there is no cap."""
    caps: list[tuple[int, float | None]] = [(0, None)]
    for k in range(1, P_POSITIONS + 1):
        caps.append((k, angular(k / (P_POSITIONS - k) if k < P_POSITIONS else math.inf).cap))
    return [[next(group)[0], cap] for cap, group in groupby(caps, key=lambda pair: pair[1])]


def explorer_data(runs: Sequence[RunSteps] = ()) -> dict[str, Any]:
    """Everything that the page shows, as plain data."""
    rows = []
    for name, row in RETRACTIONS.items():
        ends, values = angle_pieces(row)
        rows.append({"name": name, "formula": row.formula, "cap": row.cap, "ends": ends, "values": values})
    return {
        "retractions": rows,
        "largestBeta": LARGEST_BETA,
        "positions": P_POSITIONS,
        "familyCaps": _family_caps(),
        "layers": LAYERS,
        "journey": {"sublayers": SUBLAYERS, "dimensions": DIMENSIONS},
        "colours": {kind: len(places) for kind, places in COLOURS.items()},
        # lambda of every sublayer, by schedule and then by number of layers
        "schedules": [
            {"name": name, "factors": [[_short(factor(name, l, 2 * n)) for l in range(1, 2 * n + 1)] for n in LAYERS]}
            for name in SCHEDULES
        ],
        "edges": [_short(edge) for edge in BIN_EDGES],
        "runs": [
            {**run._asdict(), "sublayers": [{**s._asdict(), "median": _short(s.median)} for s in run.sublayers]}
            for run in runs
        ],
    }


def explorer_page(runs: Sequence[RunSteps] = ()) -> bytes:
    """The whole of explorer.html. The policy allows this one script and nothing from anywhere."""
    script = (FOLDER / SCRIPT).read_text(encoding="utf-8")
    page = (
        environment(FOLDER)
        .get_template(TEMPLATE)
        .render(
            data=explorer_data(runs),
            style=Markup(_colours() + (FOLDER / STYLE).read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=script_hashes([script]),
        )
    )
    return page.encode()


def _measured(runs: Sequence[Run], windows: int, data: str | None, device: str) -> list[RunSteps]:
    """The steps of each run. Runs that share a name are shown by their paths."""
    names = [run.name for run in runs]
    steps = [run_steps(run, windows, data, device) for run in runs]
    return [
        one if names.count(run.name) == 1 else one._replace(run=str(run.path))
        for run, one in zip(runs, steps, strict=True)
    ]


def _is_explorer(content: bytes) -> bool:
    return MARK in content[:4096]


def explore_command(
    runs: tuple[str, ...] = (),
    /,
    windows: int = 4,
    data: str | None = None,
    device: str = "cpu",
    out: str = "explorer.html",
) -> int:
    """Write a page that shows turning beside adding, and retractions, caps and schedules to try. It works offline.

    Args:
        runs: run directories, or directories that contain run directories. The page shows how long their steps are.
        windows: how many windows of the validation split the steps are measured on.
        data: other data: a prepared directory, or the name of a corpus.
        device: cpu or cuda; cpu is the default because lengths are taken in float64.
        out: the file to write.
    """
    check_counts(windows=windows)
    float64_device(device)
    if data is not None and not runs:
        raise ValueError(
            f"--data {data} is for measuring the steps of runs, and no run was given: give a run, or no data."
        )
    path = Path(out).expanduser()
    files.check_output_file("--out", path, _is_explorer)
    if data is not None:
        refuse_output_among_text(data, path)
    page = explorer_page(_measured([open_run(run) for run in find_runs(runs)], windows, data, device))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, page)
    print(path)
    return 0
