"""One process or many: what the loop needs to know about the other processes. The model needs nothing of this."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from spheret.model.gpt import GPT
from spheret.support.errors import unknown
from spheret.support.machine import resolve_device
from spheret.support.precision import wide
from spheret.support.ranges import check_count

PARALLEL = ("ddp", "fsdp")
# a year
MOST_SECONDS = 366 * 24 * 3600
T = TypeVar("T")
# seconds between two looks of the first process at who has come
_GLANCE = 0.01


class World:
    """The processes that train together. This class is a world of one."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def wrap(self, model: GPT, bf16: bool) -> Callable[[Tensor, Tensor], Tensor]:
        """A function from a batch to a loss, made from the model on its device."""
        return model

    def syncing(self, last: bool) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and backward: gradients are shared after the last one only."""
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in float64 where the device has it."""
        return wide(values)

    def gather(self, value: T) -> list[T]:
        """The value of every process, in the order of their ranks."""
        return [value]

    def share(self, value: T) -> T:
        """The value of the main process."""
        return value

    def restore_random(self, states: list[str], seed: int) -> None:
        """Restore this process's random state. In a world of a different size each process takes its own seed."""
        if len(states) == self.size:
            set_random_state(self.device, states[self.rank])
        else:
            torch.manual_seed(seed + self.rank)

    def close(self) -> None:
        """Leave the group."""


def _meet(store: dist.Store, rank: int, size: int, wait: timedelta) -> dist.Store:
    """A part of the store that belongs only to the processes of this start.

    torchrun keeps its store when it restarts the processes. In the store itself they would find the addresses of
    those that died, and wait for them. The number of restarts does not tell the starts apart: on several nodes only
    the node whose process died counts one. So each process leaves a name that nobody had before, and the first
    process answers to each name with the name of their room.
    """
    # answers are found by this name, so a process never reads one that was meant for its predecessor
    name = secrets.token_hex(16)
    store.set(f"spheret/name/{rank}", name)
    if rank > 0:
        store.wait([f"spheret/room/{name}"], wait)
        room = dist.PrefixStore(f"spheret/{store.get(f'spheret/room/{name}').decode()}", store)
        room.set(f"came/{rank}", "")
        return room
    room, absent, deadline = dist.PrefixStore(f"spheret/{name}", store), set(range(1, size)), time.monotonic()
    deadline += wait.total_seconds()
    while absent:
        # a name may belong to a process that died: it is read again until the living one has come
        for other in sorted(absent):
            if store.check([f"spheret/name/{other}"]):
                store.set(f"spheret/room/{store.get(f'spheret/name/{other}').decode()}", name)
        absent = {other for other in absent if not room.check([f"came/{other}"])}
        if absent and time.monotonic() > deadline:
            raise RuntimeError(f"waited for {len(absent)} of {size} processes")
        time.sleep(_GLANCE if absent else 0)
    return room


class TorchrunWorld(World):
    """The processes that torchrun started, data-parallel: DDP, or FSDP2 with its shards."""

    def __init__(self, device: torch.device, parallel: str, timeout: int) -> None:
        super().__init__(device)
        self.parallel = parallel
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._wrapped: Any = None
        if device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
        try:
            wait = timedelta(seconds=timeout)
            store, rank, size = next(rendezvous("env://", timeout=wait))
            backend = "nccl" if device.type == "cuda" else "gloo"
            room = _meet(store, rank, size, wait)
            dist.init_process_group(backend, store=room, rank=rank, world_size=size, timeout=wait)
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RuntimeError(
                f"process {self.rank} of {self.size} found no other process at {where} in {timeout} s: check that "
                f"all are started and that the address can be reached, or give a longer --timeout "
                f"({str(error).splitlines()[0]})."
            ) from error

    def wrap(self, model: GPT, bf16: bool) -> Callable[[Tensor, Tensor], Tensor]:
        if self.parallel == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            devices = [self.device] if self.device.type == "cuda" else None
            self._wrapped = DistributedDataParallel(model, device_ids=devices)
        else:
            shard(model, dist.init_device_mesh(self.device.type, (self.size,)), bf16)
            self._wrapped = model
        return self._wrapped

    def syncing(self, last: bool) -> AbstractContextManager[Any]:
        if self.parallel == "ddp":
            return nullcontext() if last else self._wrapped.no_sync()
        self._wrapped.set_requires_gradient_sync(last)
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        values = wide(values)
        dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def close(self) -> None:
        dist.destroy_process_group()


def shard(model: GPT, mesh: Any, bf16: bool) -> None:
    """Apply FSDP2: each branch with bf16 parameters and float32 reduction, then block and root in float32.

    A bf16 policy on a whole block would cast the stream. This way the stream and the learnable scalars stay float32.
    So do the norms and gains inside a branch.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.each_block():
        for branch in (block.attention, block.mlp):
            for part in branch.children():
                if not isinstance(part, torch.nn.Linear) and any(True for _ in part.parameters()):
                    fully_shard(part, mesh=mesh)
            fully_shard(branch, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # evaluation calls this method instead of forward
    register_fsdp_forward_method(model, "token_losses")


def join(wanted: str | None, parallel: str | None, timeout: int) -> World:
    """The world that this process belongs to: the one that torchrun started, or a world of one."""
    if parallel is not None and parallel not in PARALLEL:
        raise unknown("--parallel", parallel, PARALLEL)
    check_count("--timeout", timeout, most=MOST_SECONDS)
    device = resolve_device(wanted)
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if parallel is not None and not started:
        raise ValueError(
            f"--parallel {parallel} needs processes that torchrun starts: torchrun --nproc_per_node=N -m spheret "
            f"train ..."
        )
    # a single process under torchrun still shards if --parallel is given
    if started and (int(os.environ["WORLD_SIZE"]) > 1 or parallel is not None):
        return TorchrunWorld(device, parallel or "ddp", timeout)
    return World(device)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def random_state(device: torch.device) -> str:
    """The state of this process's random generators, as text."""
    return ",".join(bytes(g.get_state().numpy()).hex() for g in _generators(device))


def check_random_state(state: str) -> None:
    """Raise ValueError unless `random_state` could have returned this."""
    try:
        torch.Generator().set_state(torch.frombuffer(bytearray.fromhex(state.split(",")[0]), dtype=torch.uint8))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the saved state of the random generator cannot be used ({reason})") from None


def set_random_state(device: torch.device, state: str) -> None:
    """Restore a state that `random_state` returned."""
    # a state from a different kind of device has a different number of parts
    for generator, text in zip(_generators(device), state.split(","), strict=False):
        generator.set_state(torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))
