"""Sharded parameters: of FSDP2's DTensors a rank holds a shard; a model on one rank may have plain tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_dist.engines.settings import ModelSettings


def num_shards(settings: ModelSettings) -> int:
    """Ranks that hold one copy of the weights together."""
    return settings.fsdp_config.num_shards(dist.get_world_size())


def gathered_on(model: nn.Module) -> str | None:
    """The device on which ranks gather a model's tensors, wherever these wait; None: none is sharded."""
    return next((each.device_mesh.device_type for each in model.parameters() if isinstance(each, DTensor)), None)


def whole(tensor: Tensor, device: str | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor gathered from all ranks in `dtype` (collective); one that is not sharded has only its type changed.

    Args:
        device: where ranks gather: the shards of an offloaded model are copied there first. None: they are there.
    """
    there = tensor if device is None else tensor.to(device)
    there = there if dtype is None else there.to(dtype)
    return there.full_tensor() if isinstance(there, DTensor) else there


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_numbers(tensor: Tensor) -> Tensor:
    """The numbers in place of an optimizer's 8-bit codes, float32 in CPU memory; any other tensor as it is."""
    shard = local_shard(tensor)
    if not hasattr(shard, "codes"):
        return tensor
    numbers: Tensor = shard.cpu().dequantize()  # there, since it takes 12 bytes of each
    return DTensor(numbers, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else numbers


def replace_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer by a tensor of rank 0, of which each rank gets its part. Collective.

    Args:
        value: the whole tensor, of the same shape and type, on the model's device; only rank 0's content counts.
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
    """Free the gathered copies of parameters that a pass has left, so that the parameters are the shards again.

    The copies are in the compute type, and changes to them would be lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
