"""Reading a torch.distributed.checkpoint without running what is in it.

DCP keeps its index (`.metadata`) as a pickle, and reads values that are not tensors with `torch.load`; both would run
code that somebody has put into the file. Here the index may name DCP's own records and torch's types only, and values
are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from grpo_dist.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
# What an index is made of. Types of tensors (torch.float32, ...) come besides.
ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) not in ALLOWED:
            raise CheckpointError(
                f"it names {module}.{name}, which no checkpoint of this program has: it may run code, and is not read"
            )
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """DCP's reader, with an index that may hold nothing but what DCP writes there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's index.

        Raises:
            CheckpointError: it names anything else, or is no index.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            try:
                metadata = _IndexUnpickler(stream).load()
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from None
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is no index of a checkpoint, but a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner, which reads values that are not tensors as plain Python values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into its place."""
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))
