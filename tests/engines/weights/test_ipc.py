"""Weights handed over in shared memory, between real processes; what is done with CUDA's handles, on a faked torch."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from grpo_dist.engines.settings import SENDER
from grpo_dist.engines.weights import broadcast as ipc
from grpo_dist.engines.weights.broadcast import CudaMemory, FileMemory, Receipt, WeightGroup
from grpo_dist.engines.weights.buckets import PREFIX
from tests.engines.train.plain import told
from tests.engines.weights.test_broadcast import Peer, equal, weights
from tests.messages import refuses, says
from tests.ranks import run_ranks

FOREVER = 200.0  # a wait that is not cut short fails the test by the time limit of the ranks


class Places:
    """Devices of ranks, by name: within, a rank's memory is on its own."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def join(self, peer: Peer, senders: int, *, generation: int = 1, limit: float = FOREVER) -> WeightGroup:
        name, make = self.names[peer.rank], FileMemory.__init__

        def made(memory: FileMemory, device: torch.device) -> None:
            make(memory, device)
            memory.place = name

        with mock.patch.object(FileMemory, "__init__", made):
            return peer.join(generation, len(self.names), limit, backend="ipc", num_senders=senders)


def own_files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"{PREFIX}-*-{os.getpid()}-*/*"))


def _each_its_own(rank: int) -> Any:
    """Two actor ranks and three engines' workers on two GPUs; the ranks send other weights, to see whose came."""
    peer = Peer(rank)
    group = Places("GPU a", "GPU b", "GPU b", "GPU a", "GPU b").join(peer, 2)
    found = []
    for version, dtype in ((4, torch.float32), (5, torch.bfloat16)):
        loaded: dict[str, torch.Tensor] = {}
        own = rank if rank < 2 else (1, 0, 1)[rank - 2]
        right = weights(10 * version + own, dtype)
        answer = peer.sync(group, right.items(), version, loaded)
        found.append((answer, rank < 2 or equal(loaded, right)))
    dist.barrier()
    left = len(own_files())
    group.close()
    dist.barrier()
    return group.sends, found, left


def test_an_actor_rank_sends_to_the_workers_on_its_own_device() -> None:
    first, second, *receivers = run_ranks(5, _each_its_own)
    assert first == second == (True, [("sent", True)] * 2, 0), "and lets go of every bucket that all have taken"
    assert receivers == [(False, [(Receipt(6), True), (Receipt(6), True)], 0)] * 3


def _one_of_two_sends(rank: int) -> Any:
    peer = Peer(rank)
    group = Places(*["machine"] * 3).join(peer, 2)
    loaded: dict[str, torch.Tensor] = {}
    answer = peer.sync(group, weights(1).items(), 1, loaded) if group.sends or rank == 2 else None
    dist.barrier()
    return group.sends, answer, equal(loaded, weights(1))


def test_of_actor_ranks_on_one_device_the_first_sends() -> None:
    assert run_ranks(3, _one_of_two_sends) == [(True, "sent", False), (False, None, False), (False, Receipt(6), True)]


def _a_receiver_leaves(rank: int) -> Any:
    """Rank 2, on the first sender's GPU, cannot load its second bucket; rank 3 is on the other GPU."""
    peer = Peer(rank)
    group = Places("GPU a", "GPU b", "GPU a", "GPU b").join(peer, 2)
    if rank == 2:
        group.wait(group.broadcast(torch.empty(4032, dtype=torch.uint8)))  # the first bucket: 4,000 bytes, aligned
        group.close()
        answer = None
    else:
        answer = peer.sync(group, weights(1).items(), 1)
    dist.barrier()
    return answer


def test_a_worker_that_leaves_is_noticed_at_once_and_only_on_its_own_device() -> None:
    first, second, _, other = run_ranks(4, _a_receiver_leaves)
    says(first, "version 1", "rank 2")
    assert (second, other) == ("sent", Receipt(6))


def _a_receiver_is_killed(rank: int) -> Any:
    peer = Peer(rank)
    group = Places("GPU", "GPU").join(peer, 1)
    answer = None
    if rank == SENDER:
        with mock.patch.object(ipc, "is_alive", return_value=False):  # as of a process that was killed
            answer = peer.sync(group, weights(1).items(), 1)
        files = len(own_files())
    dist.barrier()
    return (answer, files) if rank == SENDER else None


def test_a_worker_that_is_killed_is_noticed_at_once() -> None:
    answer, files = run_ranks(2, _a_receiver_is_killed)[0]
    says(answer, "version 1", "1 weight buckets", "group 1 of 2 ranks", "rank 1")
    assert files == 0, "the buckets go with the group"


def _no_sender_there(rank: int) -> str:
    peer = Peer(rank)
    message = told(Places("GPU a", "GPU b").join, peer, 1)
    dist.barrier()
    return message


def test_an_engine_without_an_actor_rank_on_its_device_is_refused() -> None:
    none, message = run_ranks(2, _no_sender_there)
    assert none == ""
    says(message, "WeightSyncError", "group 1 of 2 ranks", "rank 1", "(GPU b)", "checkpoint_engine.backend=ipc")


# --- CUDA's handles -----------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch says about a tensor of 192 bytes on a GPU, by the names of what it opens it with."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    said = dict.fromkeys(names) | {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([192]),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 3,
        "storage_handle": b"\x00handle\xff",
        "storage_size_bytes": 512,
        "storage_offset_bytes": 1024,
        "requires_grad": False,
        "ref_counter_handle": b"/torch_7_8_9",
        "ref_counter_offset": 16,
        "event_handle": b"\xfe" * 64,
        "event_sync_required": True,
    }
    reduced = (reductions.rebuild_cuda_tensor, tuple(said[name] for name in names))
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: reduced)
    properties = {0: SimpleNamespace(uuid="1f2e"), 1: SimpleNamespace(uuid="3d4c")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    return said


def test_a_bucket_on_a_gpu_is_opened_as_torch_itself_would(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the number of the device, which is the receiver's own, and without unpickling anything."""
    content, opened, order = torch.arange(192, dtype=torch.uint8), [], []

    def rebuild(**arguments: Any) -> torch.Tensor:
        opened.append(arguments)
        return content

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append((device, target.tolist())))
    told = json.loads(json.dumps(CudaMemory(torch.device("cuda")).share(content)))
    target = torch.zeros(192, dtype=torch.uint8)
    CudaMemory(torch.device("cuda", 1)).copy(told, target)
    assert opened == [gpu | {"storage_device": 1}]
    assert order == [(torch.device("cuda", 1), list(range(192)))], "the bytes are there before the sender hears so"


def test_memory_that_cannot_be_opened_names_the_other_ways(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under WSL."""
    denied = OSError(1, "pidfd_getfd: Operation not permitted")
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", mock.Mock(side_effect=denied))
    shared = CudaMemory(torch.device("cuda")).share(torch.zeros(192, dtype=torch.uint8))
    with refuses(RuntimeError, "pidfd_getfd", "GPU 1f2e", "checkpoint_engine.backend=object_store"):
        CudaMemory(torch.device("cuda")).copy(shared, torch.zeros(192, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("expandable", [True, False])
def test_no_bucket_is_shared_from_an_expandable_segment(
    name: str, expandable: bool, gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers do not let another process open one; the allocator's other settings stay."""
    settings: list[str] = []
    monkeypatch.setenv(name, "max_split_size_mb:64" + ",expandable_segments:True" * expandable)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    shared, reduce = [], reductions.reduce_tensor
    monkeypatch.setattr(reductions, "reduce_tensor", lambda data: shared.append(data) or reduce(data))
    content = torch.arange(192, dtype=torch.uint8)
    CudaMemory(torch.device("cuda")).share(content)
    asked = ["False", "True"] if expandable else []
    assert settings == [f"max_split_size_mb:64,expandable_segments:{value}" for value in asked]
    assert torch.equal(shared[0], content)
    assert (shared[0] is content) == (not expandable), "copied while the setting was off"


def test_gpus_are_told_apart_by_what_does_not_depend_on_the_process(gpu) -> None:
    assert CudaMemory(torch.device("cuda")).place == CudaMemory(torch.device("cuda", 0)).place == "GPU 1f2e"
    assert CudaMemory(torch.device("cuda", 1)).place == "GPU 3d4c"
