"""torchrun in the environment that a user has, and its processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# nothing that helps torch.distributed find its way after a restart. Tests listen on loopback only
ENVIRONMENT = {
    **os.environ,
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)]),
}
LAUNCH = (sys.executable, "-m", "torch.distributed.run")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(*words: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*LAUNCH, *map(str, words)], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def run(*words: Any, processes: int = 2) -> None:
    """Run a script with its words in so many processes on this machine. It must succeed."""
    finish(start("--standalone", f"--nproc_per_node={processes}", *words), 300)


def finish(process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Wait for its end, which must be a success. If it takes too long, it is killed with its workers."""
    try:
        _, message = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for worker in workers(process.pid).values():
            os.kill(worker, 9)
        process.kill()
        _, message = process.communicate()
        raise AssertionError(f"no end within {seconds} s: {message.decode()[-3000:]}") from None
    assert process.returncode == 0, message.decode()[-3000:]


def workers(parent: int) -> dict[int, int]:
    """The processes that a torchrun has started and that live: their ranks and their ids."""
    ranks = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, above, *_ = (path / "stat").read_text().rsplit(")", 1)[1].split()
            if int(above) != parent or state == "Z":
                continue
            pairs = (pair.partition("=") for pair in (path / "environ").read_text().split("\0"))
            environment = {name: value for name, _, value in pairs}
            if "RANK" in environment:
                ranks[int(environment["RANK"])] = int(path.name)
        except (OSError, ValueError):
            continue
    return ranks


def wait_for_workers(process: subprocess.Popen[bytes], count: int, not_among: Sequence[int] = ()) -> dict[int, int]:
    """The workers of a torchrun once that many live, none of them among those given."""
    while process.poll() is None:
        found = workers(process.pid)
        if len(found) == count and not set(found.values()) & set(not_among):
            return found
        time.sleep(0.01)
    raise AssertionError("torchrun ended")
