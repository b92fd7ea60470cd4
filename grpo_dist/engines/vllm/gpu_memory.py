"""The memory of an engine's GPUs: whether it is free before vLLM starts, and how much vLLM has taken.

vLLM checks once how much is free and refuses to start if it is too little. If it measures the KV cache, it counts what
other processes allocate meanwhile as its own. A replaced engine starts while other roles work, and after a process
whose memory is freed with a delay. So it waits for its memory, and gets the KV cache size of its predecessor.

The numbers come from NVML, through vLLM's copy of its bindings: torch itself would allocate memory to find them out.
This has been run on fakes only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Any

from vllm.utils.import_utils import import_pynvml

from grpo_dist.engines.base import Footprint
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.errors import EngineError
from grpo_dist.sizes import GIB

# A killed process' memory is free again after seconds.
FREE_TIMEOUT_S = 120.0
POLL_S = 0.5


@dataclass(frozen=True)
class GPU:
    """One of an engine's GPUs, memory in bytes; `holders` names the processes that hold some, where they are known."""

    name: str
    free: int
    total: int
    holders: str = ""


def gpus(count: int) -> list[GPU]:
    """The present state of the first `count` GPUs that this process sees.

    Raises:
        EngineError: NVML fails.
    """
    nvml: Any = import_pynvml()
    try:
        nvml.nvmlInit()
        try:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
            return [_gpu(nvml, name.strip()) for name in seen.split(",")[:count]]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise EngineError(f"the driver does not say how much memory of the GPUs is free (NVML: {error})") from None


def needed_gib(settings: EngineSettings, total_gib: float) -> float:
    """The memory that must be free on each GPU before an engine starts; 0: not known."""
    if settings.footprint_gib is not None:
        return settings.footprint_gib
    return settings.rollout.gpu_memory_utilization * total_gib if settings.rollout.kv_cache_memory_gib is None else 0.0


async def wait_until_free(settings: EngineSettings) -> list[GPU]:
    """Wait until the memory that an engine needs is free, and no process is freeing more of it; returns the GPUs."""
    earlier: list[GPU] = []
    for _ in range(int(FREE_TIMEOUT_S / POLL_S)):
        state = gpus(settings.rollout.tensor_model_parallel_size)
        short = [gpu for gpu in state if gpu.free / GIB < needed_gib(settings, gpu.total / GIB)]
        settled = earlier and all(now.free <= then.free for now, then in zip(state, earlier, strict=True))
        if settled and not short:
            return state
        earlier = state
        await asyncio.sleep(POLL_S)
    if not short:  # it never settles, and suffices all the same
        return state
    gpu = short[0]
    needed = needed_gib(settings, gpu.total / GIB)
    raise EngineError(
        f"{gpu.name} has {gpu.free / GIB:.3g} of {gpu.total / GIB:.3g} GiB free after {FREE_TIMEOUT_S:.0f} s, and the "
        f"engine needs {needed:.3g}{gpu.holders}; lower actor_rollout_ref.rollout.gpu_memory_utilization or "
        "actor_rollout_ref.rollout.kv_cache_memory_gib, offload more of the actor "
        "(actor_rollout_ref.actor.fsdp_config), or end what else runs there"
    )


def footprint(settings: EngineSettings, before: list[GPU], after: list[GPU], kv_cache_bytes: int | None) -> Footprint:
    """Return the memory that an engine has taken of its GPUs, by their state `before` and `after` its start.

    Args:
        kv_cache_bytes: the size that vLLM chose for the KV cache; None: the settings name it.
    """
    total = max(then.free - now.free for then, now in zip(before, after, strict=True)) / GIB
    gib = settings.rollout.kv_cache_memory_gib
    assert gib is not None or kv_cache_bytes is not None, "vLLM chooses a size that the settings do not name"
    return Footprint(total, kv_cache_bytes / GIB if kv_cache_bytes is not None else gib)  # type: ignore[arg-type]


def _gpu(nvml: Any, name: str) -> GPU:
    handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes = []
    with contextlib.suppress(nvml.NVMLError):  # not everybody may ask, and it is for a message alone
        processes = [_describe(process) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    holders = f" (held by {', '.join(processes)})" if processes else ""
    return GPU(f"GPU {name}", memory.free, memory.total, holders)


def _describe(process: Any) -> str:
    """A process that holds memory. It has no name: in a container its id may be that of another process."""
    size = "some" if process.usedGpuMemory is None else f"{process.usedGpuMemory / GIB:.3g} GiB"
    return f"process {process.pid}: {size}"
