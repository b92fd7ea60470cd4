"""What an engine is told when weights come; test_vllm_engine.py and test_weight_transport.py have real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm_weight_update import WeightUpdater

LIMIT_S = 0.05


class SlowToPause:
    """vLLM with long responses in flight."""

    def __init__(self) -> None:
        self.pauses: list[dict[str, Any]] = []

    async def pause_generation(self, **options: Any) -> None:
        await asyncio.sleep(4 * LIMIT_S)
        self.pauses.append(options)


async def call(coroutine: Coroutine[Any, Any, Any], timeout_s: float | None = LIMIT_S) -> Any:
    """As the engine's."""
    return await asyncio.wait_for(coroutine, timeout_s)


@pytest.mark.parametrize(("partial", "mode"), [(False, "wait"), (True, "keep")])
def test_pausing_takes_as_long_as_responses_do_and_is_done_once(partial: bool, mode: str) -> None:
    limits = {"max_model_len": 96, "max_num_seqs": 64, "max_num_batched_tokens": 128}
    memory = {"gpu_memory_utilization": 0.8, "kv_cache_memory_gib": None}
    ways = {"enforce_eager": True, "enable_chunked_prefill": False, "partial_rollout": partial}
    settings = EngineSettings("model", "cpu", "float32", False, 1, seed=0, **limits, **memory, **ways)  # type: ignore[arg-type]
    llm = SlowToPause()
    weights = WeightUpdater(llm, call, settings=settings)

    async def pause_twice() -> None:
        await weights.pause()
        await weights.pause()

    asyncio.run(pause_twice())
    assert llm.pauses == [{"mode": mode, "clear_cache": True}]
