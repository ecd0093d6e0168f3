"""`make drill`: a study, which is what a race runs, is killed at 50 seeded moments and goes on to the same bytes."""

import random
import subprocess
import time

import pytest

from spheret.lab.rows import read_rows
from spheret.support.child import python_environment, spheret_command

KILLS = 50
PLAN = """
title = "A trial"
[model]
layers = 1
heads = 2
width = 16
block = 32
[train]
steps = 12
batch_size = 2
checkpoint_every = 2
[evaluation]
eval_every = 4
eval_windows = 4
[[parts]]
name = "two"
contestants = ["pre-ln", "post-ln"]
rates = [2e-2, 4e-2]
extend = 1
seeds = 2
"""


def start(words):
    return subprocess.Popen(
        spheret_command(words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=python_environment()
    )


def run_to_the_end(words):
    process = start(words)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()


def ends(out):
    """What every run gave but its seconds, and its last weights, bitwise."""
    results = {key: row.result for key, row in read_rows(out / "results.jsonl").items()}
    saved = sorted(out.rglob("checkpoints/*/model.safetensors"))
    return results, {str(path.relative_to(out)): path.read_bytes() for path in saved}


@pytest.mark.drill
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(prepared, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("[model]", f'[data]\npath = "{prepared}"\n[model]'))
    words = ["study", str(plan), "--quiet", "--out"]
    choose, begun = random.Random(7), time.monotonic()
    run_to_the_end([*words, str(tmp_path / "unbroken")])
    seconds, kills, turn = time.monotonic() - begun, 0, 0
    expected = ends(tmp_path / "unbroken")
    while kills < KILLS:
        out, turn = tmp_path / f"killed-{turn}", turn + 1
        while kills < KILLS:
            process = start([*words, str(out)])
            try:
                _, errors = process.communicate(timeout=choose.uniform(0, 1.2 * seconds))
                assert process.returncode == 0, errors.decode()
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
        run_to_the_end([*words, str(out)])
        assert ends(out) == expected
