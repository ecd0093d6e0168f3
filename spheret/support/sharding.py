"""Tensors that may be spread over processes (DTensor), and plain ones, alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from its shards, if it has any; then every process must ask."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(full: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, on the device and in the shards of another."""
    if not hasattr(pattern, "placements"):
        return full.to(pattern.device)
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = pattern.device_mesh  # type: ignore[attr-defined]
    # every process read the file: nothing is sent
    return distribute_tensor(full.to(mesh.device_type), mesh, pattern.placements, src_data_rank=None)
