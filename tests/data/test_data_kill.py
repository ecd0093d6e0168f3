"""A preparation that is killed at any moment and run again writes the same bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from damage import contents
from data_helpers import documents

from spheret.data import prepare

SECONDS = 1.5


def _corpus(path: Path) -> Path:
    """Enough text for several seconds of work."""
    path.mkdir()
    texts = documents(200)
    for number in range(20):
        lines = [f"{number} {n} {texts[(number * 7 + n) % 200]}" for n in range(15_000)]
        (path / f"{number:02d}.txt").write_text("\n\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("kills_wanted", "seed"),
    [pytest.param(4, 0, marks=pytest.mark.slow), pytest.param(50, 1, marks=pytest.mark.drill)],
)
def test_killed_again_and_again(kills_wanted: int, seed: int, tmp_path: Path) -> None:
    corpus, out = _corpus(tmp_path / "texts"), tmp_path / "out"
    expected = contents(prepare(str(corpus), "gpt2", tmp_path / "whole", val_fraction=0.1, shard_tokens=300_000).path)
    assert len(expected) > 20
    moments = random.Random(seed)

    def start() -> subprocess.Popen[bytes]:
        words = ["prepare", str(corpus), "--tokenizer", "gpt2", "--out", str(out), "--val-fraction", "0.1"]
        words += ["--shard-tokens", "300000"]
        words += ["--workers", str(moments.choice([1, 2, 4]))]
        return subprocess.Popen([sys.executable, "-m", "spheret", *words])

    kills = 0
    while kills < kills_wanted:
        process = start()
        # a kill while the interpreter starts would test nothing
        while not (out / "prepare.lock").exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, SECONDS))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            # it finished before the kill: start another
            assert contents(out) == expected
            out.rename(tmp_path / f"done {kills}")
        else:
            kills += 1
            (out / "prepare.lock").unlink(missing_ok=True)
    assert start().wait() == 0
    assert contents(out) == expected
