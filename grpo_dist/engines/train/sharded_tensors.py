"""FSDP2's parameters are DTensors, of which a rank holds a shard; a model on one process may have plain tensors."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_dist.engines.settings import ModelSettings


def num_shards(settings: ModelSettings) -> int:
    """Ranks that hold one copy of the weights together."""
    return dist.get_world_size() if settings.fsdp_size < 0 else min(settings.fsdp_size, dist.get_world_size())


def whole(tensor: Tensor) -> Tensor:
    """The tensor gathered from all ranks (collective), or itself where it is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a whole tensor of rank 0 in the place of a parameter or buffer, each rank its part. Collective.

    Args:
        model: the model.
        name: of the parameter or buffer.
        value: of its shape and type, on the model's device; what it holds on other ranks than 0 does not matter.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = getattr(module, leaf)
    if isinstance(old, DTensor):
        value = distribute_tensor(value, old.device_mesh, old.placements)
    else:
        dist.broadcast(value, 0)
    setattr(module, leaf, nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value)


def free_gathered(model: nn.Module) -> None:
    """Make the parameters the shards again, where a pass has left its gathered copies.

    Those are in the compute type, and what changes in them is lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
