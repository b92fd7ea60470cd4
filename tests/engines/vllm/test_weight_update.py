"""What an engine is told when weights come, and what real ones then do with responses in flight."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.config.schema_roles import LoraSyncConfig
from grpo_dist.engines.vllm.backend import VLLMBackend
from grpo_dist.engines.vllm.weight_update import WeightUpdater
from grpo_dist.errors import EngineError, WeightSyncError
from tests.messages import refuses
from tests.worker_settings import engine_settings

LIMIT_S = 0.05


class Told:
    """vLLM with weights that reach it; writes down what it is asked. To pause takes as long as responses do."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.receipt = {"loaded": 3, "fault": ""}

    async def collective_rpc(self, method: str, kwargs: Any = None) -> list[dict[str, Any]]:
        if method != "weight_receipt":
            self.asked.append((method,))
        return [self.receipt]

    async def pause_generation(self, **options: Any) -> None:
        await asyncio.sleep(4 * LIMIT_S)
        self.asked.append(("pause_generation", *options.values()))

    def __getattr__(self, name: str) -> Any:
        async def ask(*args: Any, **options: Any) -> None:
            plain = [arg for arg in args if isinstance(arg, (list, str))]
            self.asked.append((name, *plain, *options.values()))

        return ask


def told(**changes: Any) -> tuple[WeightUpdater, Told]:
    async def call(coroutine: Coroutine[Any, Any, Any], timeout_s: float | None = LIMIT_S) -> Any:
        return await asyncio.wait_for(coroutine, timeout_s)

    llm = Told()
    return WeightUpdater(llm, call, settings=engine_settings(**changes)), llm


async def asleep(**changes: Any) -> tuple[WeightUpdater, Told]:
    weights, llm = told(device="cuda", free_cache_engine=True, shares_gpu=True, **changes)
    await weights.sleep()
    return weights, llm


# Whose weights no sync brings, or not all of them.
DRAFTS = {"vllm": {"speculative_config": {"method": "draft_model", "model": "small"}}}
DAMAGED = {"fault": "weight bucket 1 is damaged"}
UPDATE = [("wake_up", ["weights"]), ("start_weight_update",), ("update_weights",), ("finish_weight_update",)]
WOKEN = [("wake_up", ["kv_cache"]), ("resume_generation",)]


@pytest.mark.parametrize(("partial", "mode"), [(False, "wait"), (True, "keep")])
async def test_pausing_takes_as_long_as_responses_do_and_is_done_once(partial: bool, mode: str) -> None:
    weights, llm = told(partial_rollout=partial)
    await weights.pause()
    await weights.pause()
    assert llm.asked == [("pause_generation", mode, True)]


async def test_an_engine_that_sleeps_has_its_cache_again_when_the_actor_has_left_its_memory() -> None:
    """Which a call of its own says. It is asked to pause no more: it has. The next sync finds it awake."""
    weights, llm = await asleep()
    await weights.pause()
    await weights.receive(0)
    assert llm.asked == [("sleep", 2, "wait"), *UPDATE, ("update_weight_version", "0")]
    llm.asked.clear()
    await weights.wake()
    assert llm.asked == WOKEN
    llm.asked.clear()
    await weights.receive(1)
    await weights.wake()
    awake = [("pause_generation", "keep", True), *UPDATE[1:], ("update_weight_version", "1"), ("resume_generation",)]
    assert llm.asked == awake
    assert weights.version == 1


async def test_an_engine_that_slept_keeps_its_weights_if_none_come() -> None:
    """Of level 1, from which vLLM has brought them back from CPU memory before it was to load others."""
    weights, llm = await asleep(**DRAFTS)
    llm.receipt = DAMAGED | {"loaded": 0}
    with refuses(WeightSyncError, "bucket 1", "damaged", "version -1"):
        await weights.receive(0)
    await weights.wake()
    assert llm.asked == [("sleep", 1, "wait"), *UPDATE, *WOKEN]


@pytest.mark.parametrize(("loaded", "held"), [(0, "dropped"), (1, "mixed")])
async def test_an_engine_that_dropped_its_weights_sleeps_on_until_whole_ones_come(loaded: int, held: str) -> None:
    """Even where none were loaded: what it would wake up with is whatever was in that memory."""
    weights, llm = await asleep()
    weights.check_not_mixed()  # what is asked for meanwhile waits in vLLM
    with refuses(WeightSyncError, "version -1", "sleeps on"):
        await weights.receive(-1)
    llm.receipt = DAMAGED | {"loaded": loaded}
    with refuses(WeightSyncError, "bucket 1", held, "paused"):
        await weights.receive(0)
    await weights.wake()
    assert llm.asked == [("sleep", 2, "wait"), *UPDATE]
    with pytest.raises(EngineError):
        weights.check_not_mixed()
    llm.receipt = {"loaded": 3, "fault": ""}
    await weights.receive(1)
    weights.check_not_mixed()
    await weights.wake()
    assert llm.asked[1 + len(UPDATE) :] == [*UPDATE, ("update_weight_version", "1"), *WOKEN]


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({}, False),
        ({"lora_rank": 4}, False),
        ({"lora_rank": 4, "lora": LoraSyncConfig(merge=False)}, True),
        ({"vllm": {"quantization": "fp8"}}, True),
        ({"vllm": {"spec_model": "small"}}, True),
        ({"vllm": {"quantization": None}}, False),
        (DRAFTS, True),
    ],
)
def test_weights_that_no_sync_brings_wait_in_cpu_memory(changes: dict[str, Any], keeps: bool) -> None:
    settings = engine_settings(**changes)
    assert VLLMBackend().keeps_sleeping_weights(settings.rollout, settings.model) == keeps


async def test_vllm_goes_on_by_itself_once_its_cache_is_there() -> None:
    """Which is why the version is set before; and why a cache that sleeps keeps an engine from sampling."""
    from vllm.v1.engine.core import EngineCore

    went_on: list[bool] = []
    memory = SimpleNamespace(is_sleeping=True, wake_up=lambda tags: None)
    core: Any = SimpleNamespace(model_executor=memory, resume_scheduler=lambda: went_on.append(True))
    EngineCore.wake_up(core, ["weights"])
    assert not went_on
    memory.is_sleeping = False
    EngineCore.wake_up(core, ["kv_cache"])
    assert went_on
