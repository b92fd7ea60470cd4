"""Weights in memory that two processes share: by CUDA IPC on a common GPU, where NCCL refuses a second process; in
files in the node's shared memory where there is no GPU.

An actor rank sends to the engines' workers on its own device; they meet in the store under the device's name. The
sender publishes the location of a bucket, every worker copies the bucket and confirms, and the sender frees it.
`SharedMemoryGroup` has the methods that `WeightGroup` uses of a process group, so headers, checksums, order and
failures are those of the broadcast (broadcast.py).

A location is plain numbers and bytes; nothing is unpickled. The tests run over files: the part for GPUs follows torch's
sources and has not been run.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from grpo_dist.engines.settings import GroupAddress
from grpo_dist.engines.weights.buckets import is_alive, new_folder, remove, shared_memory

# A rank that waits for another checks this often if that one is still alive.
WATCH = timedelta(seconds=2)
# The arguments by which torch rebuilds a tensor on a GPU that are bytes, and those that are numbers.
HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
NUMBERS = ("tensor_offset", "storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required")


class FileMemory:
    """Buckets as files in the node's shared memory. Those of a killed process are removed as in buckets.py."""

    def __init__(self, device: torch.device) -> None:
        self._folder: Path | None = None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.place = f"machine {boot}, shared memory {os.stat(shared_memory()).st_dev}"  # a container may have its own

    def share(self, data: Tensor) -> dict[str, Any]:
        """Share the bytes; returns their location, in JSON's types."""
        self._folder = self._folder or new_folder()
        path = self._folder / uuid.uuid4().hex
        data.numpy().tofile(path)
        return {"path": str(path)}

    def copy(self, shared: dict[str, Any], target: Tensor) -> None:
        """Copy the bytes that another process shares, and close them."""
        target.copy_(torch.from_file(shared["path"], shared=True, size=len(target), dtype=torch.uint8))

    def unshare(self, shared: dict[str, Any]) -> None:
        """Free bytes that every receiver has copied."""
        Path(shared["path"]).unlink()

    def close(self) -> None:
        """Free everything."""
        if self._folder is not None:
            remove(self._folder)
            self._folder = None


class CudaMemory:
    """Buckets in the memory of a GPU, opened by CUDA IPC; see `FileMemory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self.place = f"GPU {torch.cuda.get_device_properties(self.device).uuid}"  # numbers differ between processes

    def share(self, data: Tensor) -> dict[str, Any]:
        """See `FileMemory.share`. The receiver waits for the kernels that fill the bytes: an event comes too."""
        data = _outside_of_segments(
            data, os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        )
        rebuild, arguments = reductions.reduce_tensor(data)
        by_name = dict(zip(inspect.signature(rebuild).parameters, arguments, strict=True))
        return {name: bytes(by_name[name]).hex() for name in HANDLES} | {name: int(by_name[name]) for name in NUMBERS}

    def copy(self, shared: dict[str, Any], target: Tensor) -> None:
        """See `FileMemory.copy`. When this returns the copy is complete, and the sender's count of readers lowered."""
        try:
            source = self._opened(shared, target)
        except Exception as error:  # of many kinds: the driver's, the kernel's
            raise RuntimeError(
                f"{error}: memory of {self.place} cannot be opened by another process (CUDA IPC); set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=object_store"
            ) from error
        target.copy_(source)
        torch.cuda.synchronize(self.device)

    def _opened(self, shared: dict[str, Any], target: Tensor) -> Tensor:
        by_name = {name: bytes.fromhex(shared[name]) for name in HANDLES} | {name: shared[name] for name in NUMBERS}
        opened: Tensor = reductions.rebuild_cuda_tensor(
            tensor_cls=Tensor,
            tensor_size=target.shape,
            tensor_stride=(1,),
            storage_cls=torch.storage.TypedStorage,
            dtype=torch.uint8,
            storage_device=self.device.index,
            requires_grad=False,
            **by_name | {"event_sync_required": bool(shared["event_sync_required"])},
        )
        return opened

    def unshare(self, shared: dict[str, Any]) -> None:
        """See `FileMemory.unshare`: torch counts the readers by itself."""

    def close(self) -> None:
        """See `FileMemory.close`. Frees memory that a reader still had open when its bucket was freed."""
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


def _outside_of_segments(data: Tensor, conf: str) -> Tensor:
    """Return the bytes where another process can open them: containers allow it of no expandable segment."""
    plain = EXPANDABLE.sub("expandable_segments:False", conf)
    if plain == conf:
        return data
    torch._C._accelerator_setAllocatorSettings(plain)
    try:
        return data.clone()
    finally:
        torch._C._accelerator_setAllocatorSettings(conf)


class SharedMemoryGroup:
    """A rank's place in a group; made on all ranks at the same time.

    Args:
        store: at which all ranks meet.
        rank: the actor's ranks come first, then those of the engines.
        device: where the buckets lie.

    Attributes:
        store: the part of it for the ranks on this device.
        sends: whether this is a rank of the actor with receivers.
        receives: whether this is a rank of an engine.
    """

    def __init__(self, store: Any, rank: int, device: torch.device, address: GroupAddress) -> None:
        self.rank, self.memory = rank, (CudaMemory if device.type == "cuda" else FileMemory)(device)
        store.set(f"place/{rank}", json.dumps([self.memory.place, os.getpid()]))
        homes = [json.loads(store.get(f"place/{other}")) for other in range(address.world_size)]
        here = {other: pid for other, (place, pid) in enumerate(homes) if place == self.memory.place}
        receivers = [other for other in here if other >= address.num_senders]
        if (sender := min(here)) >= address.num_senders:
            raise RuntimeError(
                f"there is no actor rank where rank {rank} is ({self.memory.place}), and checkpoint_engine.backend=ipc "
                "hands weights over in memory that both share"
            )
        self.sends = rank == sender and bool(receivers)
        self.receives, self.receivers = rank >= address.num_senders, receivers
        self._peers = {e: here[e] for e in (receivers if rank == sender else [sender])}
        self._count = 0
        self.store = dist.PrefixStore(self.memory.place, store)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Handover:
        """Start to send a bucket, or to receive one into a tensor of its size."""
        self._count += 1
        shared = None
        if self.sends:
            shared = self.memory.share(tensors[0])
            self.store.set(f"bucket/{self._count}", json.dumps(shared))
        return Handover(self, self._count, tensors[0], shared)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        """Wait for keys of the store."""
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            try:
                return self.store.wait(keys, min(WATCH, limit))
            except dist.DistStoreError:  # it is not there yet
                gone = [e for e, pid in self._peers.items() if self.store.check([f"left/{e}"]) or not is_alive(pid)]
                if gone and not self.store.check(keys):
                    raise RuntimeError(f"rank {', '.join(map(str, gone))} is gone") from None
                if time.monotonic() > deadline:
                    raise

    def abort(self) -> None:
        """Leave the group; ranks that wait for this one notice."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", "")
        self.memory.close()


class Handover:
    """One bucket under way; has the methods of a broadcast's `Work`."""

    def __init__(self, group: SharedMemoryGroup, number: int, data: Tensor, shared: dict[str, Any] | None) -> None:
        self.group, self.number, self.data, self.shared = group, number, data, shared

    def wait(self, limit: timedelta) -> None:
        """Sender: wait until all receivers have the bucket. Receiver: wait until the bucket is in its own memory."""
        group, bucket = self.group, f"bucket/{self.number}"
        if self.shared is not None:
            taken = [f"taken/{self.number}/{receiver}" for receiver in group.receivers]  # with which they confirm it
            group.wait(taken, limit)
            for key in (bucket, *taken):
                group.store.delete_key(key)
            group.memory.unshare(self.shared)
        elif group.receives:
            group.wait([bucket], limit)
            group.memory.copy(json.loads(group.store.get(bucket)), self.data)
            group.store.set(f"taken/{self.number}/{group.rank}", "")
