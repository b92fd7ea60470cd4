"""Buckets as differences: the receiver has what the sender has, to the bit, or says that it has not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_dist.engines.weights.buckets import CHANGE_BYTES, Bucket, Difference, Held, Sent, difference, pack, unpack
from grpo_dist.errors import WeightSyncError
from tests.messages import refuses

SIZES = {"a": (40, 5), "b": (7,), "c": (300,)}


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.bfloat16) for name, shape in SIZES.items()}


def packed(weights: dict[str, torch.Tensor]) -> list[Bucket]:
    """Two buckets, as an engine gets them: read-only."""
    found = list(pack(weights.items(), bucket_bytes=600))
    assert [[entry.name for entry in bucket.entries] for bucket in found] == [["a", "b"], ["c"]]
    for bucket in found:
        bucket.data.flags.writeable = False
    return found


def held(buckets: list[Bucket]) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in buckets for name, tensor in unpack(bucket.data, bucket.entries)}


def assert_equal(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_only_what_has_changed_is_sent() -> None:
    weights, sent, engine = model(), Sent(), Held(keeps=True)
    first = list(sent.changes(packed(weights)))
    assert all(isinstance(each, Bucket) for each in first)
    assert sent.share == 1
    engine.take(first)
    weights["a"][3, 2], weights["b"][6] = 9.0, -9.0
    second = list(sent.changes(packed(weights)))
    assert [(each.places.tolist(), each.words.dtype) for each in second] == [
        ([17, 224 + 6], np.uint16),
        ([], np.uint16),
    ]
    assert sent.share == 2 * CHANGE_BYTES / sum(each.num_bytes for each in second)
    assert_equal(held(engine.take(second)), weights)


def test_fifty_syncs_leave_the_senders_weights_to_the_bit() -> None:
    weights, sent, engine = model(), Sent(), Held(keeps=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(50):
        for value in weights.values():
            changed = torch.rand(value.shape, generator=generator) < 0.05
            value[changed] += torch.randn(value.shape, generator=generator, dtype=torch.bfloat16)[changed]
        arrived = list(sent.changes(packed(weights)))
        assert all(isinstance(each, Difference) for each in arrived) == (step > 0)
        assert_equal(held(engine.take(arrived)), weights)
    weights["c"][0] = float("nan")
    found = held(engine.take(list(sent.changes(packed(weights)))))
    assert found["c"][0].isnan()
    assert [len(each.words) for each in sent.changes(packed(weights))] == [0, 0], "the same bits, though nan != nan"


def test_a_bucket_of_which_much_has_changed_travels_whole() -> None:
    """600 bytes are 300 words: 100 changes of 6 bytes are as long."""
    weights, sent = model(), Sent()
    list(sent.changes(packed(weights)))
    weights["c"][:99] += 1
    assert [type(each) for each in sent.changes(packed(weights))] == [Difference, Difference]
    weights["c"][:107] += 1
    assert [type(each) for each in sent.changes(packed(weights))] == [Difference, Bucket]
    assert difference(packed(weights)[0], packed(weights)[1]) is None, "other tensors"
    numbers = torch.arange(1.0, 65.0)  # of two words each
    [before] = pack({"a": numbers}.items(), bucket_bytes=600)
    numbers.view(torch.int32)[:8] += 1
    [after] = pack({"a": numbers}.items(), bucket_bytes=600)
    change = difference(before, after)
    assert change is not None
    assert change.places.tolist() == list(range(0, 16, 2)), "the low word of each"


def test_a_receiver_that_lacks_the_last_sync_wants_the_whole() -> None:
    weights, sent, late, new = model(), Sent(), Held(keeps=True), Held(keeps=True)
    late.take(list(sent.changes(packed(weights))))
    weights["a"][0] += 1
    list(sent.changes(packed(weights)))
    weights["a"][1] += 1
    arrived = list(sent.changes(packed(weights)))
    with refuses(WeightSyncError, "bucket 0", "damaged"):
        late.take(arrived)
    for engine in (late, new):
        with refuses(WeightSyncError, "bucket 0", "not held"):
            engine.take(arrived)
    again = list(sent.changes(packed(weights), whole=True))
    assert all(isinstance(each, Bucket) for each in again)
    for engine in (late, new):
        assert_equal(held(engine.take(again)), weights)
    weights["b"][0] += 1
    arrived = list(sent.changes(packed(weights)))
    assert_equal(held(new.take(arrived)), weights)


@pytest.mark.parametrize("fault", ["word", "place", "outside", "missing"])
def test_a_damaged_difference_is_found_before_anything_is_loaded(fault: str) -> None:
    weights, sent, engine = model(), Sent(), Held(keeps=True)
    engine.take(list(sent.changes(packed(weights))))
    weights["a"][0] += 1
    arrived = list(sent.changes(packed(weights)))
    first, second = arrived
    arrived = {
        "missing": [first],
        "word": [replace(first, words=first.words ^ 1), second],
        "place": [replace(first, places=first.places + 1), second],
        "outside": [replace(first, places=first.places + 1000), second],
    }[fault]
    with refuses(WeightSyncError, "missing" if fault == "missing" else "damaged"):
        engine.take(arrived)
    with refuses(WeightSyncError, "not held"):
        engine.take(list(sent.changes(packed(weights))))


def test_memory_of_the_receiver_is_used_again() -> None:
    """The first difference copies what lies in the object store; later ones change that copy."""
    weights, sent, engine = model(), Sent(), Held(keeps=True)
    found = [engine.take(list(sent.changes(packed(weights))))]
    for _ in range(2):
        weights["c"][0] += 1
        found.append(engine.take(list(sent.changes(packed(weights)))))
    first, second, third = (each[1].data for each in found)
    assert not np.shares_memory(first, second)
    assert np.shares_memory(second, third)
