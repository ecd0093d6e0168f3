"""Commands write into their output and into the cache, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = (
    "--layers", "1", "--heads", "1", "--width", "16", "--block", "16", "--batch-size", "2", "--steps", "2",
    "--set", "evaluation.eval_windows=2", "--threads", "1", "--quiet", "--scheme", "proj-spheretnorm",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Empty directories in the place of the user's own, of temporary files, and of where the command starts."""
    path = tmp_path_factory.mktemp("places")
    for name in ("home", "tmp", "here", "out"):
        (path / name).mkdir()
    return path


def run(place, *words):
    """Run a command there, with no place given to any library. Returns the folders of the cache."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MPL", "TORCH", "TRITON", "HF_", "XDG_", "SPHERET", "HUGGINGFACE"))
    }
    environment = {
        **kept, "HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "SPHERET_CACHE": str(place / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "spheret", *map(str, words)],
        env=environment,
        cwd=place / "here",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    strays = [path for name in ("home", "tmp", "here") for path in (place / name).rglob("*")]
    assert strays == []
    return {path.name.split("-")[0] for path in (place / "cache").iterdir()}


def test_training_and_a_report(place, prepared):
    out = place / "out" / "run"
    # importing torch may make Inductor's folder, which stays empty
    assert run(place, "train", *TINY, "--data", prepared, "--out", out) - {"inductor"} == {"native"}
    assert run(place, "report", out, "--out", place / "out" / "report") - {"inductor"} == {"native", "matplotlib"}


@pytest.mark.slow
def test_training_with_inductor(place, prepared):
    out = place / "out" / "compiled"
    run(place, "train", *TINY, "--set", "train.compile=true", "--data", prepared, "--out", out)
    assert list((place / "cache" / "inductor").rglob("*.so"))
