"""Model, optimizer, schedule and random states on disk, sharded with torch.distributed.checkpoint (DCP).

A save has two parts. `begin_save` copies everything to CPU memory, while the weights stand still. A thread then writes
the copies. It has a process group of its own, so that its messages never mix with those of the training going on.
(`dcp.async_save` does as much; but what follows in the same thread here, the random states and the digests of what was
written, would have to be started from its callback, in which an error is lost.)

A load runs nothing that is in a file. DCP keeps its index (`.metadata`) as a pickle, and reads values that are not
tensors with `torch.load`; both would run code that somebody has put into the file. Here the index may name DCP's own
records and torch's types only, and values are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from grpo_dist.engines.train.durable_files import FileDigest, digest_file, flush_path
from grpo_dist.engines.train.loss_scale import LossScale
from grpo_dist.engines.train.optimizer import keep_settings
from grpo_dist.engines.train.sharded_tensors import in_numbers
from grpo_dist.errors import CheckpointError
from grpo_dist.sizes import ADAM_STATES, STATE_BYTES

# Ranks wait for the slowest writer at the end of a checkpoint: as long as a slow shared disk takes for its shards.
WRITE_TIMEOUT = timedelta(minutes=30)
RANDOM_STATES, LOSS_SCALE = "random_{rank}.pt", "loss_scale"


def training_state(
    model: nn.Module, optimizer: Optimizer | None, schedule: Any, loss_scale: LossScale | None = None
) -> dict[str, Any]:
    """Return the content of a checkpoint: the weights and, of a model that trains, optimizer, schedule and loss scale.

    A weight that has several names, such as a tied output layer, is there once, under the first.
    """
    if optimizer is None:
        return {"model": _each_once(model, get_model_state_dict(model))}
    make_states(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": _each_once(model, weights), "optimizer": moments, "schedule": schedule.state_dict()}
    return state if loss_scale is None else state | {LOSS_SCALE: [loss_scale.value, loss_scale.good_steps]}


def make_states(model: nn.Module, optimizer: Optimizer) -> None:
    """Make the states of an optimizer that has taken no step, where its weights are."""
    if not optimizer.state:
        # torch does so by a step with gradients of 0, and counts it: the first real one would be a smaller one
        get_optimizer_state_dict(model, optimizer)
        for state in optimizer.state.values():
            state["step"].zero_()


def _other_names(model: nn.Module) -> dict[str, str]:
    """Further names of weights that have several -> the first one."""
    first: dict[Tensor, str] = {}
    names = {name: first.setdefault(weight, name) for name, weight in model.named_parameters(remove_duplicate=False)}
    return {name: other for name, other in names.items() if name != other}


def _each_once(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    others = _other_names(model)
    return {name: weight for name, weight in weights.items() if name not in others}


def num_bytes(model: nn.Module, optimizer: Optimizer | None) -> int:
    """Bytes of the weights and optimizer states that all ranks together write into a checkpoint."""
    if optimizer is None:
        return _size(model.parameters())
    # The optimizer has the shards; after a forward pass the model may have whole weights.
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    frozen = _size(weight for weight in model.parameters() if not weight.requires_grad)
    states = ADAM_STATES * STATE_BYTES["AdamW"] * sum(weight.numel() for weight in trained)
    return _size(trained) + frozen + int(states)


def _size(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


def copied(state: Any) -> Any:
    """A copy of nested dicts and lists, with each tensor, or this rank's shard of it, in CPU memory.

    (DCP's `stage` copies a shard three times, and what it has freed stays with the process.)
    """
    if isinstance(state, Tensor):
        state = in_numbers(state.detach())
        return state.clone() if state.device.type == "cpu" else state.cpu()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list | tuple) else state


class ShardWriter:
    """Writes this rank's shards in the background, one checkpoint at a time. Made on all ranks at once."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[dict[str, FileDigest]] | None = None

    def begin_save(self, state: dict[str, Any], folder: Path) -> None:
        """Copy `state` and this rank's random states to CPU memory, and begin to write them to `folder`. Collective."""
        if self._running is not None and not self._running.done():
            raise CheckpointError(f"{folder}: the checkpoint before it is still being written")
        # `_write` flushes the files; and what is on CPU need not be copied ahead
        writer = dcp.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
        copies, states = copied(state), random_states()
        self._running = self._thread.submit(self._write, writer, copies, states, folder)

    def finished(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """The files that this rank has written since `begin_save`, flushed to disk; None while it writes."""
        assert self._running is not None, "begin_save comes first"
        if not (wait or self._running.done()):
            return None
        try:
            return self._running.result()
        except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
            raise CheckpointError(reason(error)) from error

    def _write(
        self, writer: dcp.FileSystemWriter, state: dict[str, Any], states: dict[str, Any], folder: Path
    ) -> dict[str, FileDigest]:
        rank = dist.get_rank()
        dcp.save(state, storage_writer=writer, process_group=self._group)
        own = folder / RANDOM_STATES.format(rank=rank)
        torch.save(states, own)
        # DCP's own: __RANK_*.distcp, and on rank 0 the index
        paths = [own, *sorted(folder.glob(f"__{rank}_*")), *([folder / ".metadata"] if rank == 0 else [])]
        with ThreadPoolExecutor(1) as disk:  # which is at work while this thread digests
            flushed = disk.map(flush_path, paths)
            digests = {path.name: digest_file(path) for path in paths}
            list(flushed)  # raises what a flush has raised
        return digests


def load_training_state(
    folder: Path, model: nn.Module, optimizer: Optimizer | None, schedule: Any, loss_scale: LossScale | None = None
) -> None:
    """Read a checkpoint into a model, its optimizer, schedule and loss scale, on any number of ranks. Collective.

    The optimizer's settings stay those that it was built with, at the saved place in the schedule. Random states
    are read only on as many ranks as there were, and only for a model that trains.

    Raises:
        CheckpointError: the folder is not a readable checkpoint of this model.
    """
    state = tree_map_only(Tensor, in_numbers, training_state(model, optimizer, schedule, loss_scale))
    load_state(state, folder)
    weights: dict[str, Any] = state["model"]
    weights |= {name: weights[first] for name, first in _other_names(model).items()}
    if optimizer is None:
        set_model_state_dict(model, weights)
        return
    with keep_settings(optimizer, schedule):
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    if loss_scale is not None:
        loss_scale.value, loss_scale.good_steps = state[LOSS_SCALE]
    if len(list(folder.glob(RANDOM_STATES.format(rank="*")))) == dist.get_world_size():
        set_random_states(torch.load(folder / RANDOM_STATES.format(rank=dist.get_rank()), weights_only=True))


def load_state(state: dict[str, Any], folder: Path) -> None:
    """Read into `state`, which says what is wanted. Collective."""
    try:
        dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner())
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        raise CheckpointError(f"{folder} cannot be read as a checkpoint of this model: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The failures of a CheckpointException by rank, without its tracebacks; any other error's own text."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())


def random_states() -> dict[str, Any]:
    """The states of this process's random generators: Python's, torch's on CPU, and on its GPUs."""
    version, numbers, gauss = random.getstate()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"python": [version, list(numbers), gauss], "cpu": torch.get_rng_state(), "cuda": gpus}


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from what `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["cpu"])
    gpus: list[Tensor] = states["cuda"]
    if gpus and torch.cuda.is_available() and torch.cuda.device_count() == len(gpus):
        torch.cuda.set_rng_state_all(gpus)


_METADATA = "torch.distributed.checkpoint.metadata"
# What an index is made of. Types of tensors (torch.float32, ...) come besides.
ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA, "TensorStorageMetadata"),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")),
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
        """The checkpoint's index."""
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

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, *more: Any) -> None:
        """Take note of what is wanted; a checkpoint of passes in another type than float16 has no loss scale."""
        super().set_up_planner(state_dict, metadata, *more)
        if metadata is not None and LOSS_SCALE not in metadata.state_dict_metadata:
            self.state_dict.pop(LOSS_SCALE, None)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into its place."""
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))
