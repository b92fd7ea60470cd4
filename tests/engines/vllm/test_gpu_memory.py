"""An engine waits for the memory of its GPUs. NVML is faked: there is no GPU here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from grpo_dist.engines.base import Footprint
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm import starting
from grpo_dist.engines.vllm.starting import GPU, footprint, gpus, wait_until_free
from grpo_dist.errors import EngineError
from grpo_dist.sizes import GIB
from tests.messages import refuses, says
from tests.worker_settings import changed, engine_settings

# 35 % of the GPU, as cluster=single_gpu has it.
FIRST = engine_settings(device="cuda", gpu_memory_utilization=0.35, kv_cache_memory_gib=None)
REPLACED = changed(FIRST, kv_cache_memory_gib=20.0, footprint_gib=26.5)
GIVEN = changed(FIRST, kv_cache_memory_gib=4.0)


def wait(settings: EngineSettings, *free_gib: tuple[float, ...]) -> tuple[list[float], float]:
    """What is free in the end, and after how many seconds, of which each look at GPUs of 80 GiB finds the next one."""
    seen, last, passed = iter(free_gib), free_gib[0], [0.0]

    def look(count: int) -> list[GPU]:
        nonlocal last
        last = next(seen, last)
        assert len(last) == count
        held = " (held by process 7: 60 GiB)"
        return [GPU(f"GPU {i}", int(free * GIB), 80 * GIB, held) for i, free in enumerate(last)]

    async def sleep(seconds: float) -> None:
        passed.append(seconds)

    with mock.patch.object(starting, "gpus", look), mock.patch.object(asyncio, "sleep", sleep):
        found = asyncio.run(wait_until_free(settings))
    return [gpu.free / GIB for gpu in found], sum(passed)


@pytest.mark.parametrize(
    ("settings", "free", "seconds"),
    [
        (FIRST, [79.0], 0.5),
        (GIVEN, [1.0], 0.5),  # vLLM finds out
        (FIRST, [20.0, 27.9, 28.0, 28.0], 1.5),  # the share that vLLM asks for
        (REPLACED, [20.0, 27.9], 1.0),  # what the one before took
        (REPLACED, [30.0, 26.0, 26.5], 1.5),  # another role lets go of what it had taken for a moment
        (FIRST, [30.0, 50.0, 79.0, 79.0], 1.5),  # a process that was killed still gives back
        (REPLACED, [30.0 + i / 128 for i in range(240)], 120.0),  # it never settles, and suffices all the same
    ],
    ids=["first", "given", "share", "replaced", "moment", "killed", "never"],
)
def test_it_waits_until_that_is_free_and_stays_so(settings: Any, free: list[float], seconds: float) -> None:
    found, waited = wait(settings, *((each,) for each in free))
    assert (found, waited) == ([pytest.approx(free[-1])], seconds)


def test_memory_that_does_not_become_free_on_each_gpu_of_the_engine() -> None:
    two = changed(REPLACED, tensor_model_parallel_size=2)
    assert wait(two, (40.0, 10.0), (40.0, 27.0))[0] == [40, 27]
    with refuses(EngineError, "GPU 1", "10 of 80 GiB", "120 s"):
        wait(two, (40.0, 10.0))
    with refuses(EngineError, "GPU 0", "19.2 of 80 GiB", "120 s", "28", "process 7: 60 GiB") as caught:
        wait(FIRST, (19.25,))
    says(caught, "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.kv_cache_memory_gib")
    says(caught, "lower", "offload", "actor_rollout_ref.actor.fsdp_config")


def test_what_an_engine_took() -> None:
    """On the GPU on which it is more; without the size that vLLM found, the one that it was given."""
    before = [GPU("GPU 0", 79 * GIB, 80 * GIB), GPU("GPU 1", 70 * GIB, 80 * GIB)]
    after = [GPU("GPU 0", 51 * GIB, 80 * GIB), GPU("GPU 1", 41 * GIB, 80 * GIB)]
    assert footprint(FIRST, before, after, 20 * GIB) == Footprint(29.0, 20.0)
    assert footprint(GIVEN, before, after, None) == Footprint(29.0, 4.0)
    with pytest.raises(AssertionError):
        footprint(FIRST, before, after, None)


class NVML:
    """Three GPUs, two processes on the last one."""

    def __init__(self) -> None:
        self.open = 0
        self.names = {"GPU-ab": 2, "GPU-cd": 0}

    class NVMLError(Exception):
        """As the bindings'."""

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return self.names[name]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(free=(handle + 1) * GIB, total=8 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        held = [SimpleNamespace(pid=11, usedGpuMemory=3 << 29), SimpleNamespace(pid=12, usedGpuMemory=None)]
        return held if handle == 2 else []


HELD = " (held by process 11: 1.5 GiB, process 12: some)"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> NVML:
    found = NVML()
    monkeypatch.setattr(starting, "nvml_bindings", lambda: found)
    return found


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("", [("GPU 0", 1, ""), ("GPU 1", 2, "")]),
        ("2,0,1", [("GPU 2", 3, HELD), ("GPU 0", 1, "")]),
        ("GPU-ab,GPU-cd", [("GPU GPU-ab", 3, HELD), ("GPU GPU-cd", 1, "")]),
    ],
)
def test_the_gpus_of_an_engine_of_two_processes(
    visible: str, found: list[Any], nvml: NVML, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that Ray shows its worker, by number or by name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus(2) == [GPU(name, free * GIB, 8 * GIB, held) for name, free, held in found]
    assert nvml.open == 0


def test_a_driver_that_does_not_tell_who_holds_memory_is_enough(nvml: NVML, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not tell how much is free is not."""

    def refuse(handle: int) -> None:
        raise NVML.NVMLError("Insufficient Permissions")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert gpus(1) == [GPU("GPU 2", 3 * GIB, 8 * GIB, "")]
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)
    with refuses(EngineError, "memory", "NVML: Insufficient Permissions"):
        gpus(1)
    assert nvml.open == 0


def test_vllm_brings_the_bindings() -> None:
    """With the functions that are called."""
    found = starting.nvml_bindings()
    for name in (each for each in vars(NVML) if each.lower().startswith("nvml")):
        assert callable(getattr(found, name)), name
