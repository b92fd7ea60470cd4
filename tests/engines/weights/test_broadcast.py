"""Weight groups over gloo, and buckets in shared memory, between real processes that are in a default group as well."""

import dataclasses
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from grpo_dist.engines.rendezvous import open_store
from grpo_dist.engines.settings import SENDER, GroupAddress
from grpo_dist.engines.weights import broadcast
from grpo_dist.engines.weights.broadcast import CudaMemory, FileMemory, Receipt, WeightGroup, position_checksum, receive
from grpo_dist.engines.weights.buckets import PREFIX, Header
from grpo_dist.errors import WeightSyncError
from tests.engines.train.plain import told
from tests.messages import refuses, says
from tests.ranks import run_ranks

NAMES = tuple(f"layer.{i}" for i in range(6))
BUCKET_BYTES = 3000  # each tensor of 50 * 20 numbers takes a bucket of its own in float32, two share one in bfloat16
ALL = Receipt(6)


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(50, 20, generator=generator).to(dtype).T for name in NAMES}


class Peer:
    """One rank, and the store where its groups meet."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.store = open_store("127.0.0.1") if rank == SENDER else None
        port = [self.store.port if self.store else 0]
        dist.broadcast_object_list(port, SENDER)
        self.port = port[0]

    def join(
        self, generation: int, world_size: int, limit: float = 20.0, places: tuple[str, ...] = (), **options: Any
    ) -> WeightGroup:
        """`places`: names of the ranks' devices, on which their memory is."""
        make = FileMemory.__init__

        def made(memory: FileMemory, device: torch.device) -> None:
            make(memory, device)
            memory.place = places[self.rank]

        address = GroupAddress("127.0.0.1", self.port, generation, world_size, limit, **options)
        with mock.patch.object(FileMemory, "__init__", made):
            return WeightGroup(address, self.rank, torch.device("cpu"), self.store)

    def sync(self, group: WeightGroup, tensors: Any, version: int, loaded: dict | None = None) -> Any:
        """The sender's error or "sent"; a receiver's receipt, with what it loaded put into `loaded`."""
        if self.rank >= group.address.num_senders:
            keep = {} if loaded is None else loaded
            return receive(group, version=version, load=lambda part: keep.update((n, t.clone()) for n, t in part))
        return told(broadcast.send, group, tensors, version=version, bucket_bytes=BUCKET_BYTES) or "sent"


def _peer(rank: int, world_size: int, work: Callable[..., Any], args: tuple, options: dict[str, Any]) -> Any:
    peer = Peer(rank)
    answer = work(peer, peer.join(1, world_size, **options), *args)
    dist.barrier()  # the store must not go first
    return answer


def run_peers(world_size: int, work: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    return run_ranks(world_size, _peer, world_size, work, args, options)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_change_of_any_word_changes_the_checksum(dtype: torch.dtype) -> None:
    data = (torch.randn(1 << 18) * 50).to(dtype).view(torch.uint8)  # more words than are summed up at once
    right = position_checksum(data)
    assert position_checksum(data.clone()) == right
    for byte in (0, 7, 8, len(data) // 2 + 3, len(data) - 1):
        for bit in (1, 128):
            other = data.clone()
            other[byte] ^= bit
            assert position_checksum(other) != right, (byte, bit)
    words = data.view(torch.int64)
    exchanged = words.clone()
    exchanged[[3, 4]] = words[[4, 3]]
    assert position_checksum(exchanged.view(torch.uint8)) != right
    assert position_checksum(words.roll(1).view(torch.uint8)) != right


def _round_trips(peer: Peer, group: WeightGroup, seeds: tuple[int, ...]) -> Any:
    """Two syncs, of what the seed of a rank draws."""
    found, receives = [], peer.rank >= group.address.num_senders
    for version, dtype in ((4, torch.float32), (5, torch.bfloat16)):
        loaded: dict[str, torch.Tensor] = {}
        right = weights(10 * version + seeds[peer.rank], dtype)
        answer = peer.sync(group, right.items(), version, loaded) if group.sends or receives else None
        found.append((answer, not receives or equal(loaded, right)))
    dist.all_reduce(default := torch.ones(1))
    left = len(own_files())
    group.close()
    return group.sends, found, default.item(), left


def test_every_receiver_gets_every_tensor() -> None:
    """Twice over one group, in buckets smaller than the model; the default group goes on as before."""
    sender, *receivers = run_peers(3, _round_trips, (0, 0, 0))
    assert sender == (True, [("sent", True)] * 2, 3.0, 0)
    assert receivers == [(False, [(ALL, True)] * 2, 3.0, 0)] * 2


def _damaged_on_the_way(peer: Peer, group: WeightGroup, bucket: int) -> Any:
    plain, numbers = group.broadcast, count()

    def damaged(data: torch.Tensor) -> Any:
        if next(numbers) == bucket and peer.rank == SENDER:
            data[len(data) // 2] ^= 4
        return plain(data)

    with mock.patch.object(group, "broadcast", damaged):
        answer = peer.sync(group, weights(1).items(), 1)
    return answer, peer.sync(group, weights(2).items(), 2)


@pytest.mark.parametrize("bucket", [0, 4])
def test_a_flipped_bit_is_found_before_the_bucket_is_loaded(bucket: int) -> None:
    sender, *receivers = run_peers(3, _damaged_on_the_way, bucket)
    assert sender == ("sent", "sent"), "the others are not held up"
    for first, second in receivers:
        assert first.loaded == bucket
        says(first.fault, f"bucket {bucket}", f"(layer.{bucket} to layer.{bucket})", "damaged", "checksum")
        assert second == ALL, "the group is good for the next sync"


def _in_wrong_order(peer: Peer, group: WeightGroup) -> Any:
    publish = group.publish

    def misnumber(version: int, number: int, header: Header) -> None:
        publish(version, number, dataclasses.replace(header, number={1: 2, 2: 1}.get(number, number)))

    with mock.patch.object(group, "publish", misnumber):
        return peer.sync(group, weights(1).items(), 1)


def test_buckets_in_wrong_order_are_refused() -> None:
    receipt = run_peers(2, _in_wrong_order)[1]
    assert receipt.loaded == 1
    says(receipt.fault, "bucket 2", "1")


LIMIT = 3.0


def _a_silent_receiver(peer: Peer, group: WeightGroup) -> Any:
    gathered: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1).items():
            gathered.append(name)
            yield name, tensor

    if peer.rank == 2:
        return receive(group, version=1, load=lambda part: time.sleep(3 * LIMIT))
    started = time.monotonic()
    answer = peer.sync(group, tensors(), 1)
    return answer, time.monotonic() - started, gathered, peer.sync(peer.join(2, 2), weights(2).items(), 1)


@pytest.mark.deep
def test_a_receiver_that_does_not_answer_is_given_up_in_time() -> None:
    sender, receiver, _ = run_peers(3, _a_silent_receiver, limit=LIMIT)
    says(sender[0], "version 1", "group 1 of 3 ranks", "within 3 s")
    assert sender[2] == list(NAMES), "the other actor ranks would wait for the sender in every gather"
    # whoever's limit runs out first: the broadcast's, the sender's, or this receiver's own
    assert "weight group 1" in receiver[0].fault or "sender" in receiver[0].fault
    assert max(sender[1], receiver[1]) < 2.5 * LIMIT
    assert (sender[3], receiver[3]) == ("sent", ALL)


def _a_gather_that_fails(peer: Peer, group: WeightGroup) -> Any:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1).items())[:3]
        raise RuntimeError("all-gather failed")

    return peer.sync(group, tensors(), 1)


def test_receivers_learn_at_once_that_the_sender_failed() -> None:
    sender, receipt = run_peers(2, _a_gather_that_fails)
    says(sender, "version 1", "2 weight buckets", "RuntimeError: all-gather failed")
    assert receipt.loaded == 2
    says(receipt.fault, "sender", "bucket 2", "RuntimeError: all-gather failed")


def test_a_receiver_leaves_the_group_in_which_it_failed() -> None:
    """Else the sender would wait for it in the next bucket's broadcast."""
    group = mock.Mock(read=mock.Mock(side_effect=WeightSyncError("gone")))
    receipt = receive(group, version=1, load=lambda part: None)
    assert receipt.loaded == 0
    says(receipt.fault, "gone")
    group.close.assert_called_once_with()


def _refused(rank: int, generation: int, world_size: int, options: dict[str, Any]) -> str:
    """What ranks are told that cannot join; both have come, however late one of them is."""
    peer = Peer(rank)
    for here in (0, 1) if peer.store is not None else ():
        peer.store.set(f"weights/{generation}/joined/{here}", "")
    dist.barrier()
    message = told(peer.join, generation, world_size, **options)
    dist.barrier()
    return message


def test_a_group_that_is_not_complete_names_who_is_missing() -> None:
    for message in run_ranks(2, _refused, 7, 4, {"limit": 4.0}):
        says(message, "WeightSyncError", "group 7 of 4 ranks", "rank 2, 3", "4 s")


# --- in memory that ranks of a device share --------------------------------------------------------------------------
def on(*places: str, senders: int = 1) -> dict[str, Any]:
    """Options of a group; a wait that is not cut short fails the test by the time limit of the ranks."""
    return {"limit": 200.0, "backend": "ipc", "places": places, "num_senders": senders}


def own_files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"{PREFIX}-*-{os.getpid()}-*/*"))


def test_the_first_actor_rank_of_a_device_sends_to_the_workers_on_it() -> None:
    """Three actor ranks, of which two are on one GPU, and three workers; each rank would send other weights."""
    places = on("GPU a", "GPU b", "GPU b", "GPU b", "GPU a", "GPU b", senders=3)
    first, second, third, *receivers = run_peers(6, _round_trips, (0, 1, 2, 1, 0, 1), **places)
    assert first == second == (True, [("sent", True)] * 2, 6.0, 0), "and lets go of every bucket that all have taken"
    assert third == (False, [(None, True)] * 2, 6.0, 0)
    assert receivers == [(False, [(ALL, True), (ALL, True)], 6.0, 0)] * 3


def _a_receiver_leaves(peer: Peer, group: WeightGroup) -> Any:
    """Rank 2, on the first sender's GPU, cannot load its second bucket; rank 3 is on the other GPU."""
    if peer.rank != 2:
        return peer.sync(group, weights(1).items(), 1)
    group.wait(group.broadcast(torch.empty(4032, dtype=torch.uint8)))  # the first bucket: 4,000 bytes, aligned
    return group.close()


def test_a_worker_that_leaves_is_noticed_at_once_and_only_on_its_own_device() -> None:
    first, second, _, other = run_peers(4, _a_receiver_leaves, **on("GPU a", "GPU b", "GPU a", "GPU b", senders=2))
    says(first, "version 1", "rank 2")
    assert (second, other) == ("sent", ALL)


def _a_receiver_is_killed(peer: Peer, group: WeightGroup) -> Any:
    if peer.rank != SENDER:
        return None
    with mock.patch.object(broadcast, "is_alive", return_value=False):  # as of a process that was killed
        return peer.sync(group, weights(1).items(), 1), len(own_files())


def test_a_worker_that_is_killed_is_noticed_at_once() -> None:
    answer, files = run_peers(2, _a_receiver_is_killed, **on("GPU", "GPU"))[0]
    says(answer, "version 1", "1 weight buckets", "group 1 of 2 ranks", "rank 1")
    assert files == 0, "the buckets go with the group"


def test_an_engine_without_an_actor_rank_on_its_device_is_refused() -> None:
    none, message = run_ranks(2, _refused, 1, 2, on("GPU a", "GPU b"))
    assert none == ""
    says(message, "WeightSyncError", "group 1 of 2 ranks", "rank 1", "(GPU b)", "checkpoint_engine.backend=ipc")


# --- CUDA's handles -----------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch says about a tensor of 192 bytes on a GPU, by the names of what it opens it with."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    said = dict.fromkeys(names) | {"tensor_cls": torch.Tensor, "storage_cls": torch.storage.TypedStorage}
    said |= {"tensor_size": torch.Size([192]), "tensor_stride": (1,), "tensor_offset": 0, "dtype": torch.uint8}
    said |= {"storage_device": 3, "storage_handle": b"\x00handle\xff", "storage_size_bytes": 512}
    said |= {"storage_offset_bytes": 1024, "ref_counter_handle": b"/torch_7_8_9", "ref_counter_offset": 16}
    said |= {"event_handle": b"\xfe" * 64, "event_sync_required": True, "requires_grad": False}
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
