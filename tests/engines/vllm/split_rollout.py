"""A rollout worker whose engine is several processes, one of which can be made to read its weights wrong."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_dist.engines.vllm import weight_backend
from grpo_dist.engines.vllm.weight_backend import WorkerExtension
from grpo_dist.engines.weights.buckets import read_bucket
from grpo_dist.workers.rollout import RolloutWorker


class SplitRolloutWorker(RolloutWorker):
    """Reaches into the processes of its engine, which must have `SpoiledWorker` as their `worker_extension_cls`."""

    async def damage(self, rank: int, bucket: int) -> None:
        await self.engine._llm.collective_rpc("damage", args=(rank, bucket))

    async def num_parameters(self) -> list[int]:
        return await self.engine._llm.collective_rpc("num_parameters")

    async def shared_memory(self) -> list[list[str]]:
        return await self.engine._llm.collective_rpc("shared_memory")

    async def hang(self, folder: str) -> None:
        await self.engine._llm.collective_rpc("hang", args=(folder,))


class SpoiledWorker(WorkerExtension):
    rank: int
    model_runner: Any

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model_runner.model.parameters())

    def hang(self, folder: str) -> None:
        """Say so, and never come back."""
        Path(folder, str(self.rank)).touch()
        while True:
            time.sleep(3600)

    def damage(self, rank: int, bucket: int) -> None:
        """Change a bit of that bucket of the next sync, as this process alone sees it."""
        if self.rank != rank:
            return
        group = getattr(self.weight_transfer_engine, "group", None)
        if group is None:
            _spoil_file(bucket)
        else:
            _spoil_broadcast(group, bucket)


def _spoil_broadcast(group: Any, bucket: int) -> None:
    arriving: list[Tensor] = []
    broadcast, wait = group.broadcast, group.wait

    def spoiled_broadcast(data: Tensor) -> Any:
        arriving.append(data)
        return broadcast(data)

    def spoiled_wait(work: Any) -> None:
        wait(work)
        if len(arriving) == bucket + 1:
            arriving[bucket][len(arriving[bucket]) // 3] ^= 16

    group.broadcast, group.wait = spoiled_broadcast, spoiled_wait


def _spoil_file(bucket: int) -> None:
    def spoiled_read(file: Any) -> Any:
        found = read_bucket(file)
        if found.number != bucket:
            return found
        weight_backend.read_bucket = read_bucket
        data = found.data.copy()  # the others read the same memory
        data[len(data) // 3] ^= 16
        return replace(found, data=data)

    weight_backend.read_bucket = spoiled_read
