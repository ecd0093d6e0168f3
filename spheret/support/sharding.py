"""Functions for tensors that may be sharded over processes (DTensor) or plain."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor; the whole tensor if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, detached. If it is sharded, every process must call this."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(full: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, placed and sharded like `pattern`."""
    if not hasattr(pattern, "placements"):
        return full.to(pattern.device)
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = pattern.device_mesh  # type: ignore[attr-defined]
    # every process has the whole tensor already, so nothing is sent
    return distribute_tensor(full.to(mesh.device_type), mesh, pattern.placements, src_data_rank=None)


def reshard(module: nn.Module) -> None:
    """Let go of the whole weights that FSDP2 has gathered for a module, if the module is one of FSDP2's."""
    let_go: Any = getattr(module, "reshard", None)
    if let_go is not None and hasattr(module, "set_requires_gradient_sync"):
        let_go()
