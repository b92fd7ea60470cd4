"""Buckets in shared memory: one at a time, and none that stays; buckets as differences to those before."""

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from grpo_dist.engines.weights import buckets as module
from grpo_dist.engines.weights.buckets import Bucket, Difference, Held, Sent, check_buckets, pack, unpack
from grpo_dist.errors import WeightSyncError
from grpo_dist.supervisor import is_alive
from tests.engines.train.plain import told
from tests.messages import refuses, says


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(5, 3, generator=generator).bfloat16(),  # 30 bytes
        "norm": torch.randn(7, generator=generator),  # 28 bytes
        "scale": torch.tensor(1.5),  # a scalar: 4 bytes
        "steps": torch.arange(3),  # 24 bytes
        "head": torch.randn(4, 10, generator=generator).half(),  # 80 bytes
        "turned": torch.randn(2, 4, generator=generator).T,  # not contiguous, 32 bytes
    }


def unpacked(buckets: list[Bucket]) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in buckets for name, tensor in unpack(bucket.data, bucket.entries)}


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 128, 150, 200, 256, 1 << 20])
def test_round_trip(bucket_bytes: int) -> None:
    """In buckets that are no larger than asked, but for one of a single tensor; in their memory."""
    tensors, buckets = weights(), list(pack(weights().items(), bucket_bytes=bucket_bytes))
    result = unpacked(buckets)
    assert list(result) == list(tensors), "the order is kept"
    assert_equal(result, tensors)
    for bucket in buckets:
        last = bucket.entries[-1]
        assert last.offset + last.num_bytes <= bucket_bytes or len(bucket.entries) == 1
        assert len(bucket.data) <= -(-bucket_bytes // module.ALIGNMENT) * module.ALIGNMENT or len(bucket.entries) == 1
        assert all(entry.offset % module.ALIGNMENT == 0 for entry in bucket.entries)
        start = bucket.data.ctypes.data
        found = [tensor.data_ptr() for _, tensor in unpack(bucket.data, bucket.entries)]
        assert found == [start + entry.offset for entry in bucket.entries]
    check_buckets([pickle.loads(pickle.dumps(bucket)) for bucket in buckets])


def assert_equal(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_buckets_by_hand() -> None:
    """Each tensor takes whole units of 64 bytes: 64 + 64 + 64 fit into 200; 64 + 128 do, 64 more do not."""
    buckets = list(pack(weights().items(), bucket_bytes=200))
    names = [[entry.name for entry in bucket.entries] for bucket in buckets]
    assert names == [["embed", "norm", "scale"], ["steps", "head"], ["turned"]]
    first = buckets[0].entries
    assert [(entry.offset, entry.num_bytes) for entry in first] == [(0, 30), (64, 28), (128, 4)]
    assert (first[0].dtype, first[0].shape) == ("bfloat16", (5, 3))
    larger = [("a", torch.zeros(4)), ("big", torch.arange(100.0)), ("b", torch.ones(4))]
    assert [[entry.name for entry in b.entries] for b in pack(larger, bucket_bytes=128)] == [["a"], ["big"], ["b"]]
    assert list(pack([], bucket_bytes=64)) == []


def test_packing_is_lazy() -> None:
    """Weights are gathered one bucket at a time: no process needs room for two whole models."""
    taken: list[str] = []

    def tensors():
        for name in "abcd":
            taken.append(name)
            yield name, torch.zeros(16)

    buckets = pack(tensors(), bucket_bytes=64)
    next(buckets)
    assert taken == ["a", "b"]


def test_buckets_travel_out_of_band_and_read_only(recwarn: pytest.WarningsRecorder) -> None:
    bucket = next(pack([("w", torch.arange(10_000.0))], bucket_bytes=1 << 20))
    buffers: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(bucket, protocol=5, buffer_callback=buffers.append)
    assert len(in_band) < 1000
    received = pickle.loads(in_band, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert not received.data.flags.writeable
    ((name, tensor),) = unpack(received.data, received.entries)
    assert (name, torch.equal(tensor, torch.arange(10_000.0))) == ("w", True)
    assert not recwarn.list, "reading read-only memory is the normal case"
    with pytest.raises(RuntimeError):  # it is cut short
        unpack(np.ascontiguousarray(bucket.data[:100]), bucket.entries)


@pytest.mark.parametrize("byte", [0, 23, 40])  # the first, the last of "steps", and one of the gap behind it
def test_one_flipped_bit_is_found(byte: int) -> None:
    first, second, third = pack(weights().items(), bucket_bytes=200)
    data = second.data.copy()
    data[byte] ^= 1
    with refuses(WeightSyncError, "bucket 1", "(steps to head)", "damaged"):
        check_buckets([first, dataclasses.replace(second, data=data), third])


@pytest.mark.parametrize("order", [[0, 2, 1], [0, 1], [1, 2], [0, 0, 1, 2], []])
def test_missing_and_misplaced_buckets_are_found(order: list[int]) -> None:
    buckets = list(pack(weights().items(), bucket_bytes=200))
    says(told(check_buckets, [buckets[i] for i in order]), "WeightSyncError", order, "0, 1, 2")


KILLED = """
import os, sys
from pathlib import Path
import torch
from grpo_dist.engines.weights import buckets as module
from grpo_dist.engines.weights.buckets import pack

module.shared_memory = lambda: Path(sys.argv[1])
files = module.bucket_files(list(pack([("weight", torch.ones(64))], bucket_bytes=256)))
next(files)
(Path(sys.argv[1]) / "queue").touch()
note = module.note_segments(["queue", "never there", "../outside"])
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "shared_memory", lambda: tmp_path)
    return tmp_path


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_one_bucket_is_there_at_a_time(memory: Path) -> None:
    found: dict[str, torch.Tensor] = {}
    for number, update in enumerate(module.bucket_files(list(pack(weights().items(), bucket_bytes=200)))):
        assert files_in(memory) == [Path(update["data"])]
        bucket = module.read_bucket(update)
        assert (bucket.number, bucket.last) == (number, number == 2)
        assert module.damage(bucket, module.crc32(bucket)) == ""
        found |= unpacked([bucket])
    assert not list(memory.iterdir())
    assert_equal(found, weights())


def test_what_a_killed_process_left_is_cleared_and_what_is_in_use_is_not(memory: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(memory)])
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken note of it
    names = sorted("bucket" if len(path.name) == 32 else path.name for path in files_in(memory))
    assert names == ["bucket", "queue", module.SEGMENTS], "it was killed in the midst of a load"
    outside, foreign, my_queue = memory.parent / "outside", memory / "queue of another", memory / "my queue"
    for file in (outside, foreign, my_queue):
        file.touch()
    mine = module.bucket_files(list(pack(weights().items(), bucket_bytes=256)))
    in_use = Path(next(mine)["data"])
    assert f"-{os.getpid()}-" in in_use.parent.name
    elsewhere = memory / f"{module.PREFIX}-1-{2**30}-container"  # process ids of another namespace mean nothing here
    other = memory / f"{module.PREFIX}-notes"
    for folder in (elsewhere, other):
        folder.mkdir()
    note = module.note_segments([my_queue.name])
    module.clear_left_behind()
    assert sorted(files_in(memory)) == sorted([in_use, my_queue, note / module.SEGMENTS, foreign])
    module.remove(note)
    assert sorted(files_in(memory)) == sorted([in_use, foreign])
    assert {path for path in memory.iterdir() if path.is_dir()} == {in_use.parent, elsewhere, other}
    assert outside.exists()
    mine.close()
    assert not in_use.exists(), "a load that ends halfway leaves nothing"
    killed.wait()
    assert not is_alive(killed.pid)


def test_a_process_of_which_nothing_may_be_known_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=PermissionError))
    assert is_alive(1)


# --- differences: what the sender has, to the bit --------------------------------------------------------------------
SIZES = {"a": (40, 5), "b": (7,), "c": (300,)}


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.bfloat16) for name, shape in SIZES.items()}


def changes(weights: dict[str, torch.Tensor], sent: Sent, **options: bool) -> list[Bucket | Difference]:
    """What is sent of weights, which stand in two buckets, as an engine gets them: read-only."""
    return list(sent.changes(packed(weights), **options))


def packed(weights: dict[str, torch.Tensor]) -> list[Bucket]:
    found = list(pack(weights.items(), bucket_bytes=600))
    assert [[entry.name for entry in bucket.entries] for bucket in found] == [["a", "b"], ["c"]]
    for bucket in found:
        bucket.data.flags.writeable = False
    return found


def test_only_what_has_changed_is_sent() -> None:
    weights, sent, engine = model(), Sent(), Held(keeps=True)
    first = changes(weights, sent)
    assert all(isinstance(each, Bucket) for each in first)
    assert sent.share == 1
    engine.take(first)
    weights["a"][3, 2], weights["b"][6] = 9.0, -9.0
    second = changes(weights, sent)
    assert [each.places.tolist() for each in second] == [[17, 224 + 6], []]
    assert {each.words.dtype for each in second} == {np.dtype(np.uint16)}
    assert sent.share == 2 * module.CHANGE_BYTES / sum(each.num_bytes for each in second)
    assert_equal(unpacked(engine.take(second)), weights)


def test_fifty_syncs_leave_the_senders_weights_to_the_bit() -> None:
    weights, sent, engine = model(), Sent(), Held(keeps=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(50):
        for value in weights.values():
            changed = torch.rand(value.shape, generator=generator) < 0.05
            value[changed] += torch.randn(value.shape, generator=generator, dtype=torch.bfloat16)[changed]
        arrived = changes(weights, sent)
        assert all(isinstance(each, Difference) for each in arrived) == (step > 0)
        assert_equal(unpacked(engine.take(arrived)), weights)
    weights["c"][0] = float("nan")
    assert unpacked(engine.take(changes(weights, sent)))["c"][0].isnan()
    assert [len(each.words) for each in changes(weights, sent)] == [0, 0], "the same bits, though nan != nan"


def test_a_bucket_of_which_much_has_changed_travels_whole() -> None:
    """600 bytes are 300 words: 100 changes of 6 bytes are as long."""
    weights, sent = model(), Sent()
    changes(weights, sent)
    for count, kind in ((99, Difference), (107, Bucket)):
        weights["c"][:count] += 1
        assert [type(each) for each in changes(weights, sent)] == [Difference, kind]
    assert module.difference(*packed(weights)) is None, "other tensors"
    numbers = torch.arange(1.0, 65.0)  # of two words each
    [before] = pack({"a": numbers}.items(), bucket_bytes=600)
    numbers.view(torch.int32)[:8] += 1
    [after] = pack({"a": numbers}.items(), bucket_bytes=600)
    change = module.difference(before, after)
    assert change is not None
    assert change.places.tolist() == list(range(0, 16, 2)), "the low word of each"


def test_a_receiver_that_lacks_the_last_sync_wants_the_whole() -> None:
    weights, sent, late, new = model(), Sent(), Held(keeps=True), Held(keeps=True)
    late.take(changes(weights, sent))
    weights["a"][0] += 1
    changes(weights, sent)
    weights["a"][1] += 1
    arrived = changes(weights, sent)
    for engine, why in ((late, "damaged"), (late, "not held"), (new, "not held")):
        says(told(engine.take, arrived), "WeightSyncError", "bucket 0", why)
    again = changes(weights, sent, whole=True)
    assert all(isinstance(each, Bucket) for each in again)
    for engine in (late, new):
        assert_equal(unpacked(engine.take(again)), weights)
    weights["b"][0] += 1
    assert_equal(unpacked(new.take(changes(weights, sent))), weights)


@pytest.mark.parametrize("fault", ["word", "place", "outside", "missing"])
def test_a_damaged_difference_is_found_before_anything_is_loaded(fault: str) -> None:
    weights, sent, engine = model(), Sent(), Held(keeps=True)
    engine.take(changes(weights, sent))
    weights["a"][0] += 1
    first, *others = changes(weights, sent)
    damages = {"word": {"words": first.words ^ 1}, "place": {"places": first.places + 1}}
    damages["outside"] = {"places": first.places + 1000}
    others = others if fault != "missing" else []
    with refuses(WeightSyncError, "missing" if fault == "missing" else "damaged"):
        engine.take([dataclasses.replace(first, **damages.get(fault, {})), *others])
    says(told(engine.take, changes(weights, sent)), "WeightSyncError", "not held")
