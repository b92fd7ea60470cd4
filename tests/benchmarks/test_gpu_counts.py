"""Counts of operations against numbers worked out on paper."""

import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from benchmarks.device_counter import DeviceCounter
from benchmarks.gpu_check.scale import TINY, Groups
from benchmarks.gpu_counts import BASELINE, CASES, compare

GROUPS = Groups(groups=2, n=4, prompt=32, response=24)
HIDDEN, INNER, LAYERS = TINY["hidden_size"], TINY["intermediate_size"], TINY["num_hidden_layers"]
HEADS, KV_HEADS, WIDTH = TINY["num_attention_heads"], TINY["num_key_value_heads"], TINY["head_dim"]
WEIGHTS = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER  # matrices of a layer
# In a process of its own: the compiler is told of a GPU that is not there, and the process group is a fake.
SCRIPT = """
import json
from benchmarks.gpu_check.scale import TINY, Groups
from benchmarks.gpu_counts import count
from grpo_dist.engines.train.objectives import PolicyObjective

computed = PolicyObjective.__call__


def reads(self, micro_batch, counts):
    loss = computed(self, micro_batch, counts)
    loss.loss.item()
    return loss


groups = Groups(groups=2, n=4, prompt=32, response=24)
found = {"eager": count(TINY, groups).numbers(), "compiled": count(TINY, groups, compiled=True).numbers()}
PolicyObjective.__call__ = reads
found["two ranks, which read the loss"] = count(TINY, groups, ranks=2).numbers()
print(json.dumps(found))
"""


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_bytes_products_waits_and_copies() -> None:
    a, row, number = on_meta(64, 32), on_meta(32), on_meta(64, dtype=torch.int64)
    with DeviceCounter("") as counter:
        _ = a + a.t().reshape(64, 32)  # the transposed is copied
        _ = a * row.expand(64, 32)
        _ = a.float()
        a.zero_()
        _ = torch.nn.functional.embedding(number, on_meta(1000, 32))
    kernels = {name: tuple(numbers) for (_, name), numbers in counter.kernels.items()}
    size = 64 * 32 * 2
    counted = {"clone": 2 * size, "add": 3 * size, "mul": 2 * size + 64, "_to_copy": 3 * size, "zero_": size}
    assert kernels == {name: (1, number) for name, number in counted.items()} | {"embedding": (1, 2 * size + 64 * 8)}
    with DeviceCounter("") as counter:
        _ = on_meta(64, 32) @ on_meta(32, 16).view(32, 16)
        with counter.pause():
            on_meta(4).sum().item()
    counts = counter.phases[""]
    assert (counts.launches, counts.products, counts.flops, counts.bytes) == (1, 1, 2 * 64 * 32 * 16, 0)
    with DeviceCounter("") as counter:
        sent = torch.ones(1).to("meta")
        assert sent.item() == 1  # came from the host
        torch.ones(8).to("meta", non_blocking=True)
        on_meta(4).cpu()
        assert bool(on_meta(4).sum() > 0)
    counts = counter.phases[""]
    assert (counts.waits, counts.copies, counts.blocking, counts.copied) == (3, 2, 1, 36)


@pytest.mark.deep
def test_operations_of_an_update(found: dict[str, dict[str, float]]) -> None:
    head = 6 * GROUPS.n * GROUPS.response * TINY["vocab_size"] * HIDDEN
    # forward, again forward, and two products backward; the last product of a layer is not computed again
    again = 2 * GROUPS.tokens * LAYERS * HIDDEN * INNER
    compiled = 8 * GROUPS.tokens * LAYERS * WEIGHTS + head
    assert found["compiled"]["products, TFLOP a micro-batch"] == pytest.approx(compiled / 1e12)
    assert found["eager"]["products, TFLOP a micro-batch"] == pytest.approx((compiled - again) / 1e12)
    pairs = GROUPS.prompt**2 / 2 + GROUPS.n * GROUPS.response * (GROUPS.prompt + GROUPS.response / 2)
    attention = (2 * 4 + 10) * pairs * HEADS * WIDTH * LAYERS
    for way in ("eager", "compiled"):
        assert found[way]["attention, TFLOP a micro-batch"] == pytest.approx(attention / 1e12)


@pytest.mark.deep
def test_nobody_waits_and_compiled_layers_take_fewer_kernels_and_bytes(found: dict[str, dict[str, float]]) -> None:
    assert [counts["host waits between forward and backward"] for counts in found.values()] == [0, 0, 1]
    eager, compiled = found["eager"], found["compiled"]
    assert compiled["kernels a layer and micro-batch"] < eager["kernels a layer and micro-batch"] / 2
    assert compiled["element-wise bytes a token and layer"] < eager["element-wise bytes a token and layer"] / 3
    whole = LAYERS * (WEIGHTS + 2 * HIDDEN + 2 * WIDTH) + TINY["vocab_size"] * HIDDEN + HIDDEN
    alone, two = (found[way]["bytes of collectives a step"] for way in ("eager", "two ranks, which read the loss"))
    # gathered in bf16 before forward and before backward; gradients are scattered in fp32
    assert two - alone == pytest.approx(GROUPS.groups * (2 * 2 + 4) * whole, rel=0.01)


def test_the_baseline_has_every_case_and_a_count_that_grew_is_named() -> None:
    counts = json.loads(BASELINE.read_text())["counts"]
    assert list(counts) == [case.title for case in CASES]
    assert all(of["host waits between forward and backward"] == 0 for of in counts.values())
    assert compare({"a": 1.005, "b": 3}, {"a": 1.0, "b": 4}) == []
    assert compare({"a": 1.02}, {"a": 1.0, "b": 0}) == ["a: 1 -> 1.02", "b is no longer counted"]
    assert compare({"waits": 1}, {"waits": 0}) == ["waits: 0 -> 1"]
