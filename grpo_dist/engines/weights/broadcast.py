"""Weights from the actor straight into every vLLM worker: one broadcast per bucket, over a process group of its own.

Rank 0 is the sender; worker t of engine e has rank 1 + e * workers per engine + t. The group is NCCL's on GPU and
gloo's on CPU, and is independent of the default group; everything else is the same on both. The tests run over gloo:
the NCCL group itself has not been run on GPUs. Where actor ranks share devices with engines, each rank passes the
buckets to the engines on its own device instead (below); again everything else is the same.

A bucket's header (number, checksum, offsets of the tensors) goes ahead through the group's store. So a rank enters a
broadcast only when the sender has, and learns from the store if the sender has failed. After a failure a group is
closed; the next one has a higher generation and may have other members.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from grpo_dist.engines.rendezvous import LOOPBACK, own_ip, refuse_loopback
from grpo_dist.engines.settings import SENDER, GroupAddress
from grpo_dist.engines.weights.buckets import (
    Header,
    damage,
    new_folder,
    pack_tensors,
    remove,
    shared_memory,
    unpack,
)
from grpo_dist.errors import GrpoDistError, WeightSyncError
from grpo_dist.supervisor import is_alive

# Words that are summed up at once for a checksum: their products stay in a CPU's cache.
_CHECKSUM_WORDS = 1 << 17


@dataclass(frozen=True)
class Receipt:
    """The outcome at a receiver: the number of buckets whose loading has begun, and what went wrong ("": nothing)."""

    loaded: int = 0
    fault: str = ""


class WeightGroup:
    """A rank's place in the group; made on all ranks at the same time.

    Args:
        rank: those of senders come first.
        store: the store that the sender has opened; None: connect to it.
    """

    def __init__(self, address: GroupAddress, rank: int, device: torch.device, store: Any = None) -> None:
        self.address, self.device, self.sends = address, device, rank == SENDER
        self._limit = timedelta(seconds=address.timeout_s)
        self._group: Any = None
        self._announced: list[str] = []
        try:
            if store is None:
                store = dist.TCPStore(address.host, address.port, timeout=self._limit)
            self._store = dist.PrefixStore(f"weights/{address.generation}", store.clone())
            self._store.set_timeout(self._limit)
            self._meet(rank)
            if address.backend == "ipc":
                self._group = SharedMemoryGroup(self._store, rank, device, address)
                self._store, self.sends = self._group.store, self._group.sends
            else:
                self._group = _make_group(self._store, rank, device, address)
            self.wait(self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)))  # connects the ranks
        except (RuntimeError, ValueError) as error:
            self.close()
            raise WeightSyncError(f"{self} cannot be formed: {_first_line(error)}") from None

    def __str__(self) -> str:
        return f"weight group {self.address.generation} of {self.address.world_size} ranks"

    def publish(self, version: int, number: int, header: Header | str) -> None:
        """Sender: announce bucket `number`, or with a text why it will not come."""
        content = header if isinstance(header, str) else asdict(header)
        self._announced.append(f"{version}/{number}")
        self._store.set(self._announced[-1], json.dumps(content))

    def read(self, version: int, number: int) -> Header:
        """Receiver: wait for the announcement of bucket `number`.

        Raises:
            WeightSyncError: the sender has failed, or announced nothing in time.
        """
        key = f"{version}/{number}"
        try:
            content = json.loads(self._store.get(key))
        except RuntimeError:
            limit = f"{self.address.timeout_s:g} s"
            raise WeightSyncError(f"the sender announced no weight bucket {number} within {limit}") from None
        if isinstance(content, str):
            raise WeightSyncError(f"the sender gave up at weight bucket {number}: {content}")
        return Header.read(content)

    def forget(self) -> None:
        """Sender: delete the announcements of syncs that all receivers have finished."""
        while self._announced:
            self._store.delete_key(self._announced.pop())

    def broadcast(self, data: Tensor) -> Any:
        """Start to send `data` to all ranks, or to receive it; see `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._limit
        return self._group.broadcast([data], options)

    def wait(self, work: Any) -> None:
        """Wait for a broadcast.

        Raises:
            WeightSyncError: a rank has died or is too late.
        """
        try:
            work.wait(self._limit)  # with a limit, NCCL's too blocks until the bytes are there
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self}: a rank died or did not answer within {self.address.timeout_s:g} s ({_first_line(error)})"
            ) from None

    def close(self) -> None:
        """Leave the group; ranks that wait for this one in a broadcast notice."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _meet(self, rank: int) -> None:
        """Wait for all ranks: to make a communicator has no time limit of its own on NCCL."""
        keys = [f"joined/{r}" for r in range(self.address.world_size)]
        self._store.set(keys[rank], "")
        try:
            self._store.wait(keys, self._limit)
        except RuntimeError:
            missing = [str(r) for r, key in enumerate(keys) if not self._store.check([key])]
            limit = f"{self.address.timeout_s:g} s"
            raise RuntimeError(f"rank {', '.join(missing)} did not come within {limit}") from None


def send(group: WeightGroup, tensors: Iterable[tuple[str, Tensor]], *, version: int, bucket_bytes: int) -> None:
    """Broadcast named tensors, packed into buckets; one is packed while the one before it is on its way.

    `tensors` is used up even if this fails: gathering them is collective, and the other actor ranks go on.

    Raises:
        WeightSyncError: a receiver died or did not answer in time. The group is closed.
    """
    stream, announced = iter(tensors), 0
    try:
        group.forget()
        on_its_way = None
        for data, header in pack_tensors(stream, bucket_bytes=bucket_bytes, checksum=position_checksum):
            if on_its_way is not None:
                group.wait(on_its_way[0])
            group.publish(version, announced, header)
            announced += 1
            on_its_way = group.broadcast(data), data  # which must stay until it has arrived
        if on_its_way is not None:
            group.wait(on_its_way[0])
    except Exception as error:
        reason = _reason(error)
        with contextlib.suppress(RuntimeError):
            group.publish(version, announced, reason)
        group.close()
        for _ in stream:
            pass
        raise WeightSyncError(
            f"sync of weight version {version}, after {announced} weight buckets: {reason}"
        ) from error


def receive(group: WeightGroup, *, version: int, load: Callable[[list[tuple[str, Tensor]]], None]) -> Receipt:
    """Receive the buckets of a sync; each is verified before it is loaded.

    After a damaged bucket nothing more is loaded, but the rest is received, so that the other ranks need not wait.
    """
    loaded = number = 0
    fault, last = "", False
    try:
        while not last:
            header = group.read(version, number)
            data = torch.empty(header.num_bytes, dtype=torch.uint8, device=group.device)
            group.wait(group.broadcast(data))
            if header.number != number:
                fault = fault or f"weight bucket {header.number} arrived in place of {number}"
            fault = fault or damage(header, position_checksum(data))
            if not fault:
                loaded += 1
                load(unpack(data, header.entries))
            number, last = number + 1, header.last
    except Exception as error:  # noqa: BLE001 - vLLM would lose its type; the engine reads the receipt
        group.close()
        return Receipt(loaded, fault or _reason(error))
    return Receipt(loaded, fault)


def position_checksum(data: Tensor) -> int:
    """A checksum that a GPU computes as fast as it reads: the sum of 8-byte words times weights of their positions.

    All arithmetic wraps around at 64 bits. The weights are odd, so any change within one word is found; several changes
    cancel out about as rarely as a random number hits another one.

    Args:
        data: uint8; a multiple of 8 bytes.
    """
    weights = _weights(str(data.device))
    parts = [(part * weights[: len(part)]).sum() for part in data.view(torch.int64).split(_CHECKSUM_WORDS)]
    return int((torch.stack(parts) * weights[: len(parts)]).sum())


@functools.cache
def _weights(device: str) -> Tensor:
    """Odd numbers that look random: neighbours exchanged do not cancel out."""
    numbers = torch.arange(1, _CHECKSUM_WORDS + 1, device=device) * -0x61C8864680B583EB  # 2**64 / golden ratio
    return (numbers ^ (numbers >> 32)) | 1


def _make_group(store: Any, rank: int, device: torch.device, address: GroupAddress) -> Any:
    limit, size = timedelta(seconds=address.timeout_s), address.world_size
    store = dist.PrefixStore("group", store)
    if device.type == "cuda":
        if address.host != LOOPBACK:
            refuse_loopback(["NCCL_SOCKET_IFNAME"])
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = limit
        # without it NCCL's watchdog ends the whole process when a peer is too late
        with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return nccl(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=own_ip(address.host, address.port))], limit
    return gloo(store, rank, size, options)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, GrpoDistError) else f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


# --- memory that processes on a device share --------------------------------------------------------------------------
# By CUDA IPC on a common GPU, where NCCL refuses a second process; in files in the node's shared memory where there
# is no GPU. An actor rank sends to the engines' workers on its own device; they meet in the store under the device's
# name. The sender publishes the location of a bucket, every worker copies the bucket and confirms, and the sender
# frees it. `SharedMemoryGroup` has the methods that `WeightGroup` uses of a process group. A location is plain
# numbers and bytes; nothing is unpickled. The tests run over files: the part for GPUs follows torch's sources and has
# not been run.

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
        conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        rebuild, arguments = reductions.reduce_tensor(_outside_of_segments(data, conf))
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
        store: at which all ranks meet; the attribute is the part of it for the ranks on this device.
        rank: the actor's ranks come first, then those of the engines.

    Attributes:
        sends: whether this is a rank of the actor with receivers.
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
