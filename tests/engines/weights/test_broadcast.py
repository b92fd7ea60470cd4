"""Weight groups over gloo, between real processes that are in a default process group as well."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from grpo_dist.engines.rendezvous import open_store
from grpo_dist.engines.settings import SENDER, GroupAddress
from grpo_dist.engines.weights.broadcast import Receipt, WeightGroup, position_checksum, receive, send
from grpo_dist.engines.weights.buckets import Header
from grpo_dist.errors import WeightSyncError
from tests.engines.train.plain import told
from tests.messages import says
from tests.ranks import run_ranks

NAMES = tuple(f"layer.{i}" for i in range(6))
BUCKET_BYTES = 3000  # each tensor of 50 * 20 numbers takes a bucket of its own in float32, two share one in bfloat16
CPU = torch.device("cpu")


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

    def join(self, generation: int, world_size: int, limit: float = 20.0, **options: Any) -> WeightGroup:
        address = GroupAddress("127.0.0.1", self.port, generation, world_size, limit, **options)
        return WeightGroup(address, self.rank, CPU, self.store)

    def sync(self, group: WeightGroup, tensors: Any, version: int, loaded: dict | None = None) -> Any:
        """The sender's error or "sent"; a receiver's receipt, with what it loaded put into `loaded`."""
        if self.rank >= group.address.num_senders:
            keep = {} if loaded is None else loaded
            return receive(group, version=version, load=lambda part: keep.update((n, t.clone()) for n, t in part))
        return told(send, group, tensors, version=version, bucket_bytes=BUCKET_BYTES) or "sent"


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


def _round_trips(rank: int) -> Any:
    peer = Peer(rank)
    group = peer.join(1, 3)
    result = []
    for version, dtype in ((4, torch.float32), (5, torch.bfloat16)):
        loaded: dict[str, torch.Tensor] = {}
        answer = peer.sync(group, weights(version, dtype).items(), version, loaded)
        right = rank == SENDER or equal(loaded, weights(version, dtype))
        result.append((answer, right))
    default = torch.ones(1)
    dist.all_reduce(default)
    return result, default.item()


def test_every_receiver_gets_every_tensor() -> None:
    """Twice over one group, in buckets smaller than the model; the default group goes on as before."""
    sender, *receivers = run_ranks(3, _round_trips)
    assert sender == ([("sent", True)] * 2, 3.0)
    assert receivers == [([(Receipt(6), True), (Receipt(6), True)], 3.0)] * 2


def _damaged_on_the_way(rank: int, bucket: int) -> Any:
    peer = Peer(rank)
    group = peer.join(1, 3)
    broadcast, numbers = group.broadcast, count()

    def damaged(data: torch.Tensor) -> Any:
        if next(numbers) == bucket and rank == SENDER:
            data[len(data) // 2] ^= 4
        return broadcast(data)

    with mock.patch.object(group, "broadcast", damaged):
        answer = peer.sync(group, weights(1).items(), 1)
    return answer, peer.sync(group, weights(2).items(), 2)


@pytest.mark.parametrize("bucket", [0, 4])
def test_a_flipped_bit_is_found_before_the_bucket_is_loaded(bucket: int) -> None:
    sender, *receivers = run_ranks(3, _damaged_on_the_way, bucket)
    assert sender == ("sent", "sent"), "the others are not held up"
    for first, second in receivers:
        assert first.loaded == bucket
        says(first.fault, f"bucket {bucket}", f"(layer.{bucket} to layer.{bucket})", "damaged", "checksum")
        assert second == Receipt(6), "the group is good for the next sync"


def _in_wrong_order(rank: int) -> Any:
    peer = Peer(rank)
    group = peer.join(1, 2)
    publish = group.publish

    def misnumber(version: int, number: int, header: Header | str) -> None:
        assert isinstance(header, Header)
        wrong = {1: 2, 2: 1}.get(number, number)
        publish(version, number, dataclasses.replace(header, number=wrong))

    with mock.patch.object(group, "publish", misnumber):
        return peer.sync(group, weights(1).items(), 1)


def test_buckets_in_wrong_order_are_refused() -> None:
    receipt = run_ranks(2, _in_wrong_order)[1]
    assert receipt.loaded == 1
    says(receipt.fault, "bucket 2", "1")


def _a_silent_receiver(rank: int, limit: float) -> Any:
    peer = Peer(rank)
    group = peer.join(1, 3, limit)
    gathered: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1).items():
            gathered.append(name)
            yield name, tensor

    started = time.monotonic()
    if rank == 2:
        receive(group, version=1, load=lambda part: time.sleep(3 * limit))
        return None
    answer = peer.sync(group, tensors(), 1)
    took = time.monotonic() - started
    again = peer.join(2, 2)
    return answer, took, gathered, peer.sync(again, weights(2).items(), 1)


@pytest.mark.deep
def test_a_receiver_that_does_not_answer_is_given_up_in_time() -> None:
    """And the ranks that do answer form a group without it, in which the same sync can start anew."""
    limit = 3.0
    (sent, took, gathered, sent_again), (receipt, waited, _, received_again), _ = run_ranks(
        3, _a_silent_receiver, limit
    )
    says(sent, "version 1", "group 1 of 3 ranks", "within 3 s")
    assert took < 2.5 * limit
    assert gathered == list(NAMES), "the other actor ranks would wait for the sender in every gather"
    # whoever's limit runs out first: the broadcast's, the sender's, or this receiver's own
    assert "weight group 1" in receipt.fault or "sender" in receipt.fault
    assert waited < 2.5 * limit
    assert (sent_again, received_again) == ("sent", Receipt(6))


def _a_gather_that_fails(rank: int) -> Any:
    peer = Peer(rank)
    group = peer.join(1, 2)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1).items())[:3]
        raise RuntimeError("all-gather failed")

    answer = peer.sync(group, tensors(), 1)
    dist.barrier()  # the store must not go first
    return answer


def test_receivers_learn_at_once_that_the_sender_failed() -> None:
    sender, receipt = run_ranks(2, _a_gather_that_fails)
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


def _a_rank_that_does_not_come(rank: int) -> str:
    peer = Peer(rank)
    if peer.store is not None:  # both have come, however late one of them is
        for here in (0, 1):
            peer.store.set(f"weights/7/joined/{here}", "")
    dist.barrier()
    with pytest.raises(WeightSyncError) as caught:
        peer.join(7, 4, 4.0)
    dist.barrier()  # the store must not go first
    return str(caught.value)


def test_a_group_that_is_not_complete_names_who_is_missing() -> None:
    expected = "weight group 7 of 4 ranks cannot be formed: rank 2, 3 did not come within 4 s"
    assert run_ranks(2, _a_rank_that_does_not_come) == [expected] * 2
