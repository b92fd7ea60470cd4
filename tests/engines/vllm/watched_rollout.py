"""A rollout worker that can be met at work, however late the test is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from grpo_dist.workers.rollout import RolloutWorker


class WatchedRolloutWorker(RolloutWorker):
    """Waits by itself until so many sequences are being sampled, and then does what it was asked for."""

    async def load_weights_when_running(self, count: int, buckets: Sequence[ray.ObjectRef], version: int) -> int:
        await self._running(count)
        return await self.load_weights(buckets, version)

    async def score(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
        engine: Any = self.engine
        return list((await engine.score(prompt, response)).log_probs)

    async def abort_when_running(self, count: int, uids: Sequence[str]) -> None:
        await self._running(count)
        await self.abort(uids)

    async def _running(self, count: int) -> None:
        while self.engine.load.running < count:
            await asyncio.sleep(0)
