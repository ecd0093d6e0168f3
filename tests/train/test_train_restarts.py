"""torchrun starts the processes again after one of them was killed, and the run ends as an unbroken one does."""

import os
import random
import signal
import time

import drill
import pytest
import torchrun
from train_helpers import TINY

from spheret.runs.layout import METRICS

WORDS = (
    "-m", "spheret", "train", "--scheme", "proj-spheretnorm", "--steps", "30", "--set", "train.tokens_per_update=512",
    "--eval-every", "10", "--set", "train.checkpoint_every=3", "--parallel", "ddp", "--resume", *TINY,
)  # fmt: skip
# a restart takes two starts of Python and torch, and what torchrun waits: on two busy cores
PATIENCE = 120


@pytest.fixture(scope="module")
def unbroken(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("restarts") / "unbroken"
    torchrun.finish(torchrun.start("--standalone", "--nproc_per_node=2", *WORDS, "--data", prepared, "--out", out))
    return out


def launch(mode, *words, restarts=2):
    """torchrun as its documents start it on one machine: --standalone, or nothing, or with an address."""
    port = torchrun.free_port()
    modes = {"standalone": ["--standalone"], "plain": [f"--master_port={port}"]}
    return torchrun.start(*modes[mode], "--nproc_per_node=2", f"--max-restarts={restarts}", *WORDS, *words)


def kill(process, rank, out, moment, size):
    """Kill one worker so many seconds after the workers appear, or when the metrics reach a part of their size."""
    kind, amount = moment
    found = torchrun.wait_for_workers(process, 2)
    if kind == "seconds":
        time.sleep(amount)
    else:
        assert drill.reached(process, out / METRICS, int(amount * size)), process.stderr.read().decode()[-2000:]
        found = torchrun.wait_for_workers(process, 2)
    os.kill(found[rank], signal.SIGKILL)
    return found.values()


@pytest.mark.slow
def test_two_kills_of_one_run(prepared, unbroken, tmp_path):
    """The first process before the first step, then the second one between two checkpoints."""
    process = launch("plain", "--data", prepared, "--out", tmp_path / "run")
    size = (unbroken / METRICS).stat().st_size
    old = kill(process, 0, tmp_path / "run", ("seconds", 1.0), size)
    torchrun.wait_for_workers(process, 2, not_among=old)
    kill(process, 1, tmp_path / "run", ("part", 0.5), size)
    torchrun.finish(process, PATIENCE)
    assert drill.differences(unbroken, tmp_path / "run") == []


@pytest.mark.drill
@pytest.mark.parametrize("node", [0, 1])
def test_a_kill_on_one_of_two_nodes(node, prepared, unbroken, tmp_path):
    """torchrun counts the restart on one node only, and both must meet again."""
    out = tmp_path / "run"
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{torchrun.free_port()}", "--rdzv_id=test"]
    words = ["--nnodes=2", "--nproc_per_node=1", "--max-restarts=2", "--local_addr=127.0.0.1", *meet, *WORDS]
    nodes = [torchrun.start(f"--node_rank={rank}", *words, "--data", prepared, "--out", out) for rank in (0, 1)]
    try:
        assert drill.reached(nodes[0], out / METRICS, (unbroken / METRICS).stat().st_size // 2)
        (worker,) = torchrun.workers(nodes[node].pid).values()
        os.kill(worker, signal.SIGKILL)
        for process in nodes:
            torchrun.finish(process, PATIENCE)
    finally:
        for process in nodes:
            process.terminate()
    assert drill.differences(unbroken, out) == []


def _moments():
    """Ten seeded kills: the first process and the second, while they start, meet, train and save."""
    choose = random.Random(1337)
    for number in range(10):
        moment = ("seconds", choose.uniform(0, 6)) if number % 5 < 2 else ("part", choose.uniform(0.02, 0.95))
        yield ("standalone", "plain")[number // 5], number % 2, moment


@pytest.mark.drill
@pytest.mark.parametrize(("mode", "rank", "moment"), list(_moments()))
def test_ten_kills(mode, rank, moment, prepared, unbroken, tmp_path):
    process = launch(mode, "--data", prepared, "--out", tmp_path / "run")
    kill(process, rank, tmp_path / "run", moment, (unbroken / METRICS).stat().st_size)
    begun = time.monotonic()
    torchrun.finish(process, PATIENCE)
    print(f"{mode}, rank {rank}, {moment[0]} {moment[1]:.2f}: {time.monotonic() - begun:.1f} s to the end")
    assert drill.differences(unbroken, tmp_path / "run") == []
