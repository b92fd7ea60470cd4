"""What vLLM is started with: its environment and its arguments, from an engine's settings."""

from __future__ import annotations

import logging
import os
from typing import Any

from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.adapter import adapter_args
from grpo_dist.engines.vllm.profile import profiler_args
from grpo_dist.engines.vllm.tokenizer import tokenizer_args
from grpo_dist.errors import ConfigError
from grpo_dist.sizes import CPU_KV_CACHE_GIB, GIB, KV_BLOCK_TOKENS

# With a given size of the KV cache vLLM uses this share only to refuse to start on a full GPU, which gpu_memory.py
# checks instead.
UNCHECKED_SHARE = 0.01


def quiet_environment(device: str) -> None:
    """Set vLLM's environment, before it is imported: no progress bars, no telemetry, a fast start on CPU.

    The processes of a tensor parallel engine inherit it.
    """
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # beside the tracebacks of the process itself
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    cpu = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps the executor inside the core
        "TORCHDYNAMO_DISABLE": "1",  # or the first log-probs compile C++ for seconds
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines and trainers share the cores
    }
    for name, value in (quiet | (cpu if device == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)


def engine_args(settings: EngineSettings, *, folder: str) -> Any:
    """The `AsyncEngineArgs` of an engine; `settings.engine_kwargs` win.

    Args:
        settings: of the engine.
        folder: that `prepare` has made, for its tokenizer.

    Raises:
        ConfigError: vLLM does not have one of the arguments, or takes no LoRA adapters with this model.
    """
    from vllm import AsyncEngineArgs

    args = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
        "generation_config": "vllm",  # the checkpoint's sampling defaults do not leak in
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that was sampled from
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **tokenizer_args(settings, f"{folder}/tokenizer"),
        **_batching(settings),
        **_processes(settings),
        **_memory(settings),
        **adapter_args(settings),
        **profiler_args(settings),
    }
    if settings.override_config:
        args["hf_overrides"] = dict(settings.override_config)
    try:
        return AsyncEngineArgs(**args | dict(settings.engine_kwargs))
    except TypeError as error:  # an argument that vLLM does not have
        names = ", ".join(settings.engine_kwargs)
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.vllm: {error}; given: {names}") from None


def _batching(settings: EngineSettings) -> dict[str, Any]:
    """How requests are batched."""
    cpu = settings.device == "cpu"
    chunked = settings.enable_chunked_prefill and not cpu  # on CPU it crashes requests that carry a seed
    least = 0 if chunked else settings.max_model_len
    return {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(settings.max_num_batched_tokens, least),
        "enable_chunked_prefill": chunked,
        "enforce_eager": settings.enforce_eager or cpu,
    }


def _processes(settings: EngineSettings) -> dict[str, Any]:
    """The engine's workers, and the transport of their weights."""
    from vllm.config import WeightTransferConfig

    from grpo_dist.engines.vllm.weight_backend import BACKENDS, WorkerExtension

    args: dict[str, Any] = {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        "weight_transfer_config": WeightTransferConfig(backend=BACKENDS[settings.weight_transport]),
    }
    if settings.tensor_parallel_size > 1:
        # Processes of the engine's own. In a Ray placement group vLLM would choose Ray's, one GPU for each bundle, and
        # refuse the engine's, which has all of its GPUs.
        args["distributed_executor_backend"] = "mp"
        if settings.collective_timeout_s is not None:
            args["distributed_timeout_seconds"] = settings.collective_timeout_s
            args["cpu_distributed_timeout_seconds"] = settings.collective_timeout_s
    return args


def _memory(settings: EngineSettings) -> dict[str, Any]:
    """The memory of each worker."""
    cpu = settings.device == "cpu"
    gib = settings.kv_cache_memory_gib or (CPU_KV_CACHE_GIB if cpu else None)
    share = settings.gpu_memory_utilization if gib is None else UNCHECKED_SHARE
    args: dict[str, Any] = {"block_size": KV_BLOCK_TOKENS["cpu"]} if cpu else {"gpu_memory_utilization": share}
    if settings.free_cache_engine:
        args["enable_sleep_mode"] = True
    return args | ({} if gib is None else {"kv_cache_memory_bytes": int(gib * GIB)})
