"""Small runs through the command line itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drill import timeless

from spheret.cli import main
from spheret.runs.metrics import whole_metrics
from spheret.runs.run import open_run

TINY = (
    "--layers", "2", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4",
    "--set", "evaluation.eval_windows=4",
    "--threads", "1", "--quiet",
)  # fmt: skip


def train(out: Path, data: Path | str, *words: str, scheme: str = "proj-spheretnorm", steps: int = 6) -> int:
    arguments = ["train", "--scheme", scheme, "--data", str(data), "--steps", str(steps), *TINY]
    # argparse lets the last of two equal flags win
    return main([*arguments, "--out", str(out), *words])


def metrics(out: Path) -> list[dict[str, Any]]:
    """Lines without what the clock decides."""
    return timeless(whole_metrics(out / "metrics.jsonl"))


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out)]


def weights(out: Path) -> bytes:
    return (open_run(out).checkpoint().path / "model.safetensors").read_bytes()
