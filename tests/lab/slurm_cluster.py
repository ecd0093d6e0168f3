"""A real SLURM of one node in a directory of its own, as any user, on loopback alone. It ends with its block."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

# cred_expire also says how long a job waits that was put back into the queue: half of it
CONFIG = """\
ClusterName=spheret
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=10
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A cluster that runs. `environment` is for processes that use it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(directory / "slurm.conf")}

    def call(self, *words: str) -> str:
        """What one of SLURM's commands prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Name and state of every job that is in the queue, by its id."""
        lines = self.call("squeue", "--noheader", "--array", "--format=%i %j %T").splitlines()
        return {id: (name, state) for id, name, state in map(str.split, lines)}

    def wait_until_empty(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while jobs := self.jobs():
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {seconds:.0f} s the queue still holds {jobs}")
            time.sleep(0.5)


def check_installed() -> None:
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        raise RuntimeError(f"SLURM is not installed ({', '.join(missing)} missing). On Debian, as root: {INSTALL}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _start(directory: Path, words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A daemon in the foreground, as a child of ours: so that its id is known and it is ended by that alone."""
    with (directory / f"{words[0]}.log").open("wb") as log:
        return subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


@contextlib.contextmanager
def cluster(cores: int = 2) -> Iterator[Cluster]:
    """Start munged, slurmctld and slurmd. At the end, also after an error, every job and all three are ended."""
    check_installed()
    # the name of a socket may have about a hundred bytes
    directory = Path(tempfile.mkdtemp(prefix="spheret-slurm-", dir="/tmp"))
    daemons: list[subprocess.Popen[bytes]] = []
    here = Cluster(directory)
    try:
        for name in ("state", "spool"):
            (directory / name).mkdir()
        key = directory / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        config = CONFIG.format(
            host=socket.gethostname().split(".")[0], user=getpass.getuser(), directory=directory, cores=cores,
            controller=free_port(), node=free_port(),
        )  # fmt: skip
        (directory / "slurm.conf").write_text(config)
        places = {"key-file": "key", "pid-file": "munged.pid", "seed-file": "seed", "socket": "munge.socket"}
        flags = [f"--{flag}={directory / name}" for flag, name in places.items()]
        munged = ["munged", "--foreground", "--force", *flags]
        for words in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.append(_start(directory, words, here.environment))
            # slurmctld asks munged at once
            _wait_for(here, daemons, lambda: (directory / "munge.socket").exists())
        _wait_for(here, daemons, lambda: here.call("sinfo", "--noheader", "--format=%T").strip() == "idle")
        yield here
    finally:
        _end(here, daemons)
        shutil.rmtree(directory)


def _wait_for(here: Cluster, daemons: Sequence[subprocess.Popen[bytes]], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            if ready():
                return
        ended = [process.args[0] for process in daemons if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in here.directory.glob("*.log"))
            raise RuntimeError(f"SLURM does not start ({', '.join(ended) or 'it takes too long'}).\n{logs}")
        time.sleep(0.1)


def _end(here: Cluster, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the jobs first: they would outlive slurmd."""
    try:
        if len(daemons) == 3 and here.jobs():
            user = f"--user={getpass.getuser()}"
            here.call("scancel", user)
            here.wait_until_empty(60)
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        print(f"the jobs could not be ended: {error}")
    for process in reversed(daemons):
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
