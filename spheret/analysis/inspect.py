"""`spheret inspect`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from spheret.analysis import figures
from spheret.analysis.dynamics import dynamics, gradients
from spheret.analysis.source import data_of, validation_windows
from spheret.analysis.sublayers import check_finite
from spheret.data import Data
from spheret.model.gpt import GPT
from spheret.runs.layout import INSPECT, INSPECT_FIGURE
from spheret.runs.run import Run, manifest_sha256, open_run
from spheret.support import files
from spheret.support.meter import Meter

# key of a layer's record: what the table calls it
QUANTITIES = {
    "norm": "|h|",
    "massive": "max/median",
    "sink": "sink",
    "angle": "angle",
    "update_cosine": "cos updates",
    "token_cosine": "cos tokens",
    "effective_rank": "rank",
    "removal": "loss without",
    "gradient": "|gradient|",
    "initial_gradient": "at the start",
}
THROUGH = "|gradient| first/last layer, by step"
MEANINGS = (
    "max/median: of activations; sink: attention to the first token; cos updates: with the update before; "
    "cos tokens: between tokens, 1 is collapse; rank: effective, of the tokens' states; "
    "loss without: what removing the layer adds; |gradient|: of its weights, here and before training."
)


def inspect_run(
    run: Run, step: int | None = None, windows: int = 8, data: str | None = None, quiet: bool = True
) -> dict[str, Any]:
    """The dynamics of a run's checkpoint, its gradients at the start, and its gradients through training."""
    model = run.model(step)
    found = run.checkpoint(step).step
    check_finite(model, f"checkpoint step-{found} of {run.path}")
    chosen = data_of(run, data)
    x, y = validation_windows(
        chosen, model.config.block, windows * max(1, min(model.config.block, chosen.tokens("val") - 1))
    )
    sublayers = 2 * model.config.layers
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        meter.show(f"{done} of {sublayers} sublayers", done / sublayers)

    with Meter(f"inspect {run.name}", quiet) as meter:
        seen = dynamics(model, x, y, tick)
    before = initial(run, chosen)
    at_start = [None] * sublayers if before is None else gradients(before, x, y)["weights"]
    for layer, gradient in zip(seen["sublayers"], at_start, strict=True):
        layer["initial_gradient"] = gradient
    training = [
        {"step": line["step"], "gradients": [layer["grad_norm"] for layer in line["sublayers"]]}
        for line in run.metrics()
        if "sublayers" in line
    ]
    return {
        "format": "spheret-inspect",
        "version": 1,
        "run": run.name,
        "scheme": model.config.scheme,
        "checkpoint": found,
        "windows": windows,
        **seen,
        "training": training,
    }


def initial(run: Run, data: Data) -> GPT | None:
    """The run's model before its first step, drawn again from its seed; None where it did not start from that."""
    config, train = run.model_config, run.config["train"]
    if "seed" not in train or train.get("init_from") is not None:
        return None
    # frequencies of other data would start another model
    if config.head_bias == "unigram" and manifest_sha256(data) != run.config["data"]["manifest_sha256"]:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(train["seed"]))
        return GPT(config, data.counts() if config.head_bias == "unigram" else None).eval()


def inspect_command(
    run: str,
    other: str | None = None,
    /,
    step: int | None = None,
    windows: int = 8,
    data: str | None = None,
    out: str | None = None,
) -> int:
    """Print and plot the dynamics of a run's stream, or of two runs side by side.

    Args:
        run: a run directory; inspect.json and inspect.png are written into it.
        other: another one to stand beside it.
        step: the step of the checkpoint; the newest without it.
        windows: how many validation windows are looked at.
        data: other data: a prepared directory, or the name of a corpus.
        out: another directory to write to.
    """
    if windows < 1:
        raise ValueError(f"--windows must be at least 1, got {windows}.")
    opened = [open_run(path) for path in (run, other) if path is not None]
    found = [inspect_run(each, step, windows, data, quiet=False) for each in opened]
    directory = Path(out).expanduser() if out else opened[0].path
    directory.mkdir(parents=True, exist_ok=True)
    files.write_atomically(directory / INSPECT, files.dump({"runs": found}))
    files.write_atomically(directory / INSPECT_FIGURE, figure(found))
    show(found)
    print(MEANINGS)
    print(f"{directory / INSPECT} and {INSPECT_FIGURE}")
    return 0


def names(found: list[dict[str, Any]]) -> list[str]:
    """What to call each run; by number too where two have one name."""
    plain = [each["run"] for each in found]
    return plain if len(set(plain)) == len(plain) else [f"{name} ({i})" for i, name in enumerate(plain, start=1)]


def show(found: list[dict[str, Any]]) -> None:
    """A row a sublayer; two runs share each cell."""
    from rich.console import Console
    from rich.table import Table

    titles = [
        f"{name}, {each['scheme']}, step {each['checkpoint']}: loss {each['loss']:.4f}"
        for name, each in zip(names(found), found, strict=True)
    ]
    table = Table(title=" | ".join(titles), title_justify="left")
    table.add_column("sublayer", justify="right")
    table.add_column("branch")
    for title in QUANTITIES.values():
        table.add_column(title, justify="right")
    for index in range(max(len(each["sublayers"]) for each in found)):
        rows = [each["sublayers"][index] if index < len(each["sublayers"]) else None for each in found]
        cells = [_cell([_text(row, key) for row in rows]) for key in QUANTITIES]
        table.add_row(str(index + 1), "mlp" if index % 2 else "attention", *cells)
    Console(width=None if sys.stdout.isatty() else 100 + 80 * (len(found) - 1) + 30).print(table)


def _cell(texts: list[str]) -> str:
    return "-" if set(texts) == {"-"} else " | ".join(texts)


def _text(layer: dict[str, Any] | None, key: str) -> str:
    return "-" if layer is None or layer[key] is None else f"{layer[key]:.3g}"


def figure(found: list[dict[str, Any]]) -> bytes:
    """A panel a quantity with a line a run, and the gradient of the first and last layer through training."""
    titles = {**QUANTITIES, "gradient": "|gradient| of weights", "initial_gradient": "|gradient| before training"}
    panels: dict[str, dict[str, figures.Series]] = {}
    for key, title in titles.items():
        panels[title] = {
            name: _series(each["sublayers"], key) for name, each in zip(names(found), found, strict=True)
        }
    for name, each in zip(names(found), found, strict=True):
        steps, distances = each["training"], each["angular_distance"]
        # null is what was not finite
        steps = [line for line in steps if None not in (line["gradients"][0], line["gradients"][-1])]
        ends = [line["gradients"][0] / max(line["gradients"][-1], 1e-30) for line in steps]
        panels.setdefault(THROUGH, {})[name] = [line["step"] for line in steps], ends
        panels.setdefault("angle to the last state over pi", {})[name] = (
            list(range(len(distances))),
            [row[-1] for row in distances],
        )
    log = ("|h|", "max/median", "|gradient| of weights", "|gradient| before training", THROUGH)
    return figures.lines(" and ".join(names(found)), panels, "sublayer", log=log)


def _series(layers: list[dict[str, Any]], key: str) -> figures.Series:
    there = [layer for layer in layers if layer[key] is not None]
    return [layer["sublayer"] for layer in there], [layer[key] for layer in there]
