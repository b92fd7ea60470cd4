"""What is in the shards of a checkpoint, read by this process alone."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_dist.engines.train.checkpoint import SafePlanner, SafeReader


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor, by name."""
    return {name: each.size.numel() * each.properties.dtype.itemsize for name, each in _tensors(folder).items()}


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Each tensor, whole, by name."""
    found = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in _tensors(folder).items()}
    dcp.load(found, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=True)
    return found


def _tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    metadata = SafeReader(folder).read_metadata().state_dict_metadata
    return {name: each for name, each in metadata.items() if isinstance(each, TensorStorageMetadata)}
