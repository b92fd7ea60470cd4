"""The memory of an engine's GPUs: whether it is free before vLLM starts, and how much vLLM has taken.

vLLM looks once at what is free and refuses to start, or measures what is left and charges what other processes take
meanwhile to itself. An engine that is replaced starts beside roles that are at work, and after a process whose memory
the driver gives back with a delay. So it waits for the memory, and has the KV cache of the one before, unmeasured.

Asked is NVML, through vLLM's copy of its bindings: torch would take memory itself for asking. Run on fakes only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_dist.engines.base import Footprint
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.errors import EngineError

GIB = 2**30
# A killed process' memory is free again after seconds.
PATIENCE_S = 120.0
POLL_S = 0.5


@dataclass(frozen=True)
class GPU:
    """One of an engine's GPUs, memory in bytes; `holders` says who holds some, where that can be found out."""

    name: str
    free: int
    total: int
    holders: str = ""


def gpus(count: int) -> list[GPU]:
    """The first GPUs that this process sees, as they are now.

    Raises:
        EngineError: NVML does not tell.
    """
    nvml = _nvml()
    try:
        return _gpus(nvml, count)
    except nvml.NVMLError as error:
        raise EngineError(f"the driver does not say how much memory of the GPUs is free (NVML: {error})") from None


def _gpus(nvml: Any, count: int) -> list[GPU]:
    nvml.nvmlInit()
    try:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        return [_gpu(nvml, each.strip()) for each in seen.split(",")[:count]]
    finally:
        nvml.nvmlShutdown()


def needed_gib(settings: EngineSettings, total_gib: float) -> float:
    """What must be free on each GPU before an engine starts; 0: not known."""
    if settings.footprint_gib is not None:
        return settings.footprint_gib
    return settings.gpu_memory_utilization * total_gib if settings.kv_cache_memory_gib is None else 0.0


async def wait_until_free(settings: EngineSettings, look: Callable[[int], list[GPU]] | None = None) -> list[GPU]:
    """Wait until an engine has the memory free that it needs, and no process is giving back more of it.

    Returns:
        Its GPUs as they are then.

    Raises:
        EngineError: it did not become free in time.
    """
    look = look or gpus
    before: list[GPU] = []
    for _ in range(int(PATIENCE_S / POLL_S)):
        found = look(settings.tensor_parallel_size)
        short = [gpu for gpu in found if gpu.free / GIB < needed_gib(settings, gpu.total / GIB)]
        settled = before and all(now.free <= then.free for now, then in zip(found, before, strict=True))
        if settled and not short:
            return found
        before = found
        await asyncio.sleep(POLL_S)
    if not short:  # it never settles, and suffices all the same
        return found
    gpu = short[0]
    needed = needed_gib(settings, gpu.total / GIB)
    raise EngineError(
        f"{gpu.name} has {gpu.free / GIB:.3g} of {gpu.total / GIB:.3g} GiB free after {PATIENCE_S:.0f} s, and the "
        f"engine needs {needed:.3g}{gpu.holders}; lower actor_rollout_ref.rollout.gpu_memory_utilization or "
        "actor_rollout_ref.rollout.kv_cache_memory_gib, offload more of the actor "
        "(actor_rollout_ref.actor.fsdp_config), or end what else runs there"
    )


def footprint(settings: EngineSettings, before: list[GPU], after: list[GPU], kv_cache_bytes: int | None) -> Footprint:
    """What an engine has taken between two looks.

    Args:
        settings: the engine's.
        before: its GPUs before it started.
        after: likewise when it had.
        kv_cache_bytes: the size vLLM found for the KV cache; None: the settings name it.
    """
    total = max(then.free - now.free for then, now in zip(before, after, strict=True)) / GIB
    gib = settings.kv_cache_memory_gib
    assert gib is not None or kv_cache_bytes is not None, "vLLM measures what nobody names"
    return Footprint(total, kv_cache_bytes / GIB if kv_cache_bytes is not None else gib)  # type: ignore[arg-type]


def _nvml() -> Any:
    from vllm.utils.import_utils import import_pynvml

    return import_pynvml()


def _gpu(nvml: Any, name: str) -> GPU:
    handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes = []
    with contextlib.suppress(nvml.NVMLError):  # not everybody may ask, and it is for a message alone
        processes = [_told(each) for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    holders = f" (held by {', '.join(processes)})" if processes else ""
    return GPU(f"GPU {name}", memory.free, memory.total, holders)


def _told(process: Any) -> str:
    """A process that holds memory. In a container its id may be that of another one there: so no name."""
    size = "some" if process.usedGpuMemory is None else f"{process.usedGpuMemory / GIB:.3g} GiB"
    return f"process {process.pid}: {size}"
