"""What every start of vLLM needs: its environment, set before it is imported, a folder and plain errors; processes that
end with the one that started them; and memory of its GPUs that is free.

The other modules of this folder import vLLM at their top, but for this one, backend.py, front.py and server.py.

With `tied_core()` the kernel kills the engine core together with the rollout worker; vLLM's own would outlive a killed
worker, and hold its GPUs. This and local_llm.py rely on the internals of vLLM 0.32: with another version
`knows_internals` is false, and vLLM starts in its own way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Any

from grpo_dist.engines.base import Footprint
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.errors import ConfigError, EngineError, GrpoDistError
from grpo_dist.hosts import stay_on_loopback
from grpo_dist.sizes import GIB
from grpo_dist.supervisor import end_with_parent
from grpo_dist.terminal import quiet_libraries

ARGUMENTS_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def quiet_environment(device: str) -> None:
    """Set vLLM's environment, before it is imported: no progress bars, no telemetry, a fast start on CPU.

    The processes of a tensor parallel engine inherit it.
    """
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # beside the tracebacks of the process itself
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": "8192",  # in a request; more ends the core, which takes 128 words
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    cpu = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps the executor inside the core
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # which a Triton for CPU would bring; ours is tested with the other
        "TORCHDYNAMO_DISABLE": "1",  # or the first log-probs compile C++ for seconds
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines and trainers share the cores
    }
    for name, value in (quiet | (cpu if device == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    quiet_libraries()
    logging.getLogger("vllm").setLevel(logging.ERROR)


def prepare(device: str) -> tempfile.TemporaryDirectory[str]:
    """Set vLLM's environment before it is imported; returns the folder of its sockets and its tokenizer."""
    quiet_environment(device)
    stay_on_loopback()  # the processes of an engine share a node
    # vLLM itself would never delete its sockets. RAY_TMPDIR is short where TMPDIR is too long for the paths of sockets.
    folder = tempfile.TemporaryDirectory(prefix="grpo_dist-", dir=os.environ.get("RAY_TMPDIR"))
    os.environ["VLLM_RPC_BASE_PATH"] = folder.name
    return folder


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of importing and starting vLLM, within this block, into plain ones of this package."""
    try:
        yield
    except GrpoDistError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm: vLLM cannot be imported ({error}). "
            "Install it with `pip install -e '.[cpu]'`, or '.[gpu]' on a GPU machine."
        ) from error
    except ValueError as error:  # pydantic's ValidationError is one too
        reason = next((line for line in str(error).splitlines() if "error, " in line.lower()), str(error))
        raise ConfigError(f"actor_rollout_ref.rollout: vLLM refuses the settings: {reason.strip()[:400]}") from None
    except Exception as error:  # its processes fail on their own, and vLLM says only that they did
        log = os.path.realpath("/proc/self/fd/2")  # to which this process and its children write errors
        where = f"; the reason is in {log}" if os.path.isfile(log) else ""
        raise RuntimeError(f"vLLM did not start: {type(error).__name__}: {error}{where}") from error


KNOWN_VERSION = "0.32."


def knows_internals() -> bool:
    """Tell if the installed vLLM is one whose internals are known."""
    for package in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package).startswith(KNOWN_VERSION)
    return False


class TiedProcess(SpawnProcess):
    """A process that is killed when the one that started it has ended."""

    def run(self) -> None:
        """Run the core."""
        end_with_parent()
        super().run()


class _Context:
    Process = TiedProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(get_context("spawn"), name)


@contextlib.contextmanager
def tied_core() -> Iterator[None]:
    """Within this block, vLLM starts engine cores as processes that end with this one, if its internals are known."""
    if not knows_internals():
        yield
        return
    import vllm.v1.engine.utils as engine_utils

    original = engine_utils.get_mp_context
    engine_utils.get_mp_context = lambda: _Context()  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        engine_utils.get_mp_context = original


# --- the memory of its GPUs -------------------------------------------------------------------------------------------
# vLLM checks once how much is free and refuses to start if it is too little. If it measures the KV cache, it counts
# what other processes allocate meanwhile as its own. A replaced engine starts while other roles work, and after a
# process whose memory is freed with a delay. So it waits for its memory, and gets the KV cache size of its
# predecessor. This has been run on fakes only.

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


def nvml_bindings() -> Any:
    """Return vLLM's copy of NVML's bindings. torch itself would allocate memory to find out how much is free."""
    from vllm.utils.import_utils import import_pynvml

    return import_pynvml()


def gpus(count: int) -> list[GPU]:
    """The present state of the first `count` GPUs that this process sees.

    Raises:
        EngineError: NVML fails.
    """
    nvml: Any = nvml_bindings()
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

    `kv_cache_bytes` is the size that vLLM chose for the KV cache; None: the settings name it.
    """
    total = max(then.free - now.free for then, now in zip(before, after, strict=True)) / GIB
    gib = settings.rollout.kv_cache_memory_gib if kv_cache_bytes is None else kv_cache_bytes / GIB
    assert gib is not None, "vLLM chooses a size that the settings do not name"
    return Footprint(total, gib)


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
