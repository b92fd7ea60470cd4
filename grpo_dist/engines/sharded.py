"""FSDP2's parameters are DTensors, of which a rank holds a shard; a model on one process may have plain tensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor gathered from all ranks (collective), or itself where it is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
