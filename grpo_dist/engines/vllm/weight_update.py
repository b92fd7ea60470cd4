"""How a running vLLM engine replaces its weights, or LoRA's factors alone, by whichever transport they come.

The engine pauses (the prefix cache is dropped), loads, sets the version and resumes. Running requests are held
meanwhile. The settings can make them end first, or keep their cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from grpo_dist.engines.base import rollout_backend
from grpo_dist.engines.settings import EngineSettings, GroupAddress
from grpo_dist.engines.vllm.arguments import KEY, REMEDY
from grpo_dist.engines.vllm.local_llm import LocalLLM
from grpo_dist.engines.weights.buckets import Bucket, Difference, Held, bucket_files
from grpo_dist.errors import ConfigError, EngineError, WeightSyncError


class WeightUpdater:
    """The weights of one engine; see `EngineWeights`.

    Attributes:
        updating: whether an update is under way: from the pause until requests go on.

    Args:
        llm: vLLM's AsyncLLM, or LocalLLM.
        call: awaits one of its calls within a time limit (`timeout_s`), and makes its exceptions ours.
    """

    def __init__(self, llm: Any, call: Callable[..., Awaitable[Any]], *, settings: EngineSettings) -> None:
        self._llm, self._call, self._lora = llm, call, settings.lora
        self._pause = {
            "mode": "keep" if settings.rollout.partial_rollout else "wait",
            "clear_cache": settings.rollout.clear_kv_cache_on_update,
        }
        self._held = Held(keeps=settings.rollout.checkpoint_engine.changes_only)
        keeps = rollout_backend(settings.rollout.name).keeps_sleeping_weights(settings.rollout, settings.model)
        self._level = 1 if keeps else 2  # vLLM's levels of sleep: 2 drops the weights, since a sync brings all of them
        self.version = -1
        self.updating = False
        self._mixed = ""
        self._paused = self._asleep = False

    @property
    def _dropped(self) -> bool:
        """Whether the engine has no weights but those of a sync that failed."""
        return self._asleep and self._level > 1

    def check_not_mixed(self) -> None:
        """Refuse to sample after a failed sync that has left some old and some new weights, or none of either."""
        if self._mixed:
            raise EngineError(self._mixed)

    async def pause(self) -> None:
        """Hold the running requests, or let them end first, until weights have come; nothing if they are held already.

        To let them end takes as long as the longest response, which only the driver can limit
        (trainer.stage_timeout_s).
        """
        if not self._paused:
            self.updating = True
            await self._call(self._llm.pause_generation(**self._pause), timeout_s=None)
            self._paused = True

    async def sleep(self) -> None:
        """Drop the KV cache, and drop the weights or move them to CPU memory, until new ones have come."""
        if self._asleep:  # since the update of another role
            return
        self.updating = True
        await self._call(self._llm.sleep(level=self._level, mode="wait"))
        self._paused = self._asleep = True

    async def load(self, buckets: Sequence[Bucket | Difference], version: int) -> None:
        """See `EngineWeights.load`; all buckets are checked before the first is loaded."""
        with self._keeps_weights(version):
            self._check_newer(version)
            whole = self._held.take(buckets)
        if isinstance(self._llm, LocalLLM):
            await self._replace(({"bucket": bucket} for bucket in whole), version)
            return
        with contextlib.closing(bucket_files(whole)) as files:
            await self._replace(({"file": file} for file in files), version)

    async def join(self, address: GroupAddress, first_rank: int) -> None:
        """See `EngineWeights.join`; without the group the engine keeps its weights."""
        group = {"address": asdict(address), "first_rank": first_rank}
        await self._workers("init_weight_transfer_engine", {"init_info": group})
        _, fault = await self._receipt()
        if fault:
            raise WeightSyncError(fault)

    async def receive(self, version: int) -> None:
        """See `EngineWeights.receive`. If nothing had been loaded before a fault, the engine keeps its weights.

        Otherwise it has some old and some new ones, and stays paused until a whole sync succeeds or its worker is
        replaced; the message says which.

        Raises:
            EngineError: the engine failed, and is replaced.
        """
        with self._keeps_weights(version):
            self._check_newer(version)
        await self._replace([{"version": version}], version)

    async def _replace(self, updates: Iterable[dict[str, Any]], version: int) -> None:
        await self.pause()
        if self._asleep:
            await self._call(self._llm.wake_up(["weights"]))
        await self._workers("start_weight_update")
        for update in updates:
            await self._workers("update_weights", {"update_info": update})
        loaded, fault = await self._receipt()
        await self._workers("finish_weight_update")  # also after a fault: the layers become whole again
        if self._lora is not None:  # those before are in force again
            await self.install_factors(complete=not fault)
            loaded = 0
        if fault and (loaded or self._dropped):  # what sleeps stays asleep
            held = f"mixed of versions {self.version} and {version}"
            if self._dropped:
                held = f"mixed of version {version} and what was left in memory, since it dropped its own to sleep"
            self._mixed = (
                f"sync of weight version {version}: {fault}; {loaded} weight buckets were loaded before, so the "
                f"engine's weights are {held}: it stays paused until a whole sync succeeds, or its worker is replaced"
            )
            raise WeightSyncError(self._mixed)
        if not fault:
            await self._call(self._llm.update_weight_version(str(version)))
            self.version, self._mixed = version, ""
        if not self._mixed and not self._asleep:
            await self._go_on()
        with self._keeps_weights(version):
            if fault:
                raise WeightSyncError(fault)

    async def wake(self) -> None:
        """Have the KV cache again, and go on; nothing if the engine is awake.

        In a call of its own: until the actor has left the GPU the cache's memory may be missing, and vLLM samples on as
        soon as the cache is there.
        """
        if self._asleep and not self._mixed:
            await self._call(self._llm.wake_up(["kv_cache"]))
            self._asleep = False
            await self._go_on()

    async def _go_on(self) -> None:
        await self._call(self._llm.resume_generation())
        self._paused = self.updating = False

    async def install_factors(self, *, complete: bool) -> None:
        """Where LoRA's factors are sent: put those that have arrived in force, if they are `complete`."""
        if self._lora is None:
            return
        args = (*self._lora.factors.values(), complete)
        problems = await self._call(self._llm.collective_rpc("install_factors", args=args))
        if problem := next(filter(None, problems), ""):
            raise ConfigError(f"{KEY}=false: {problem}; {REMEDY}")

    async def _workers(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        return await self._call(self._llm.collective_rpc(method, kwargs=kwargs))

    async def _receipt(self) -> tuple[int, str]:
        """(the most buckets that a worker of the engine has loaded, the first fault that a worker reports or "")."""
        receipts = await self._workers("weight_receipt")
        faults = [
            f"tensor parallel rank {rank}: {receipt['fault']}" if len(receipts) > 1 else receipt["fault"]
            for rank, receipt in enumerate(receipts)
            if receipt["fault"]
        ]
        return max(receipt["loaded"] for receipt in receipts), next(iter(faults), "")

    def _check_newer(self, version: int) -> None:
        if version <= self.version:
            raise WeightSyncError(f"weight version {version} came after version {self.version}")

    @contextlib.contextmanager
    def _keeps_weights(self, version: int) -> Iterator[None]:
        """Add to errors of the block, which loads nothing, that the engine keeps its weights."""
        try:
            yield
        except WeightSyncError as error:
            kept = "the engine sleeps on" if self._dropped else f"the engine keeps version {self.version}"
            raise WeightSyncError(f"sync of weight version {version}: {error}; {self._mixed or kept}") from None
