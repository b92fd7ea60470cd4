"""What vLLM is started with: its environment and its arguments, from an engine's settings.

Its tokenizer is the one that prompts are made with. Its own torch profiler must know the folder of traces when the
engine is made, and names the files itself: so an engine has a folder of its own, from which its traces are taken.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_dist.assets.tokenizer import is_read_as_it_is, load_tokenizer
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.adapter import adapter_args
from grpo_dist.errors import ConfigError, EngineError
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


def engine_args(settings: EngineSettings, *, folder: str, usual: Mapping[str, Any] | None = None) -> Any:
    """The `AsyncEngineArgs` of an engine; the config's `engine_kwargs` win.

    Args:
        settings: of the engine.
        folder: that `prepare` has made, for its tokenizer.
        usual: arguments that are others where the config does not name them; None: none are.
    """
    from vllm import AsyncEngineArgs

    args = {
        "model": settings.model.path,
        "dtype": settings.dtype,
        "trust_remote_code": settings.model.trust_remote_code,
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
        **(usual or {}),
    }
    if settings.model.override_config:
        args["hf_overrides"] = dict(settings.model.override_config)
    own = {name: value for name, value in settings.rollout.engine_kwargs.vllm.items() if value is not None}
    try:
        return AsyncEngineArgs(**args | own)
    except TypeError as error:  # an argument that vLLM does not have
        names = ", ".join(own)
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.vllm: {error}; given: {names}") from None


def _batching(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments that say how requests are batched."""
    cpu = settings.device == "cpu"
    chunked = settings.rollout.enable_chunked_prefill and not cpu  # on CPU it crashes requests that carry a seed
    least = 0 if chunked else settings.max_model_len
    return {
        "max_num_seqs": settings.rollout.max_num_seqs,
        "max_num_batched_tokens": max(settings.rollout.max_num_batched_tokens, least),
        "enable_chunked_prefill": chunked,
        "enforce_eager": settings.rollout.enforce_eager or cpu,
    }


def _processes(settings: EngineSettings) -> dict[str, Any]:
    """The engine's workers, and the transport of their weights."""
    from vllm.config import WeightTransferConfig

    from grpo_dist.engines.vllm.weight_backend import BACKENDS, WorkerExtension

    args: dict[str, Any] = {
        "tensor_parallel_size": settings.rollout.tensor_model_parallel_size,
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        "weight_transfer_config": WeightTransferConfig(backend=BACKENDS[settings.weight_transport]),
    }
    if settings.rollout.tensor_model_parallel_size > 1:
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
    gib = settings.rollout.kv_cache_memory_gib or (CPU_KV_CACHE_GIB if cpu else None)
    share = settings.rollout.gpu_memory_utilization if gib is None else UNCHECKED_SHARE
    args: dict[str, Any] = {"block_size": KV_BLOCK_TOKENS["cpu"]} if cpu else {"gpu_memory_utilization": share}
    if settings.sleeps:
        args["enable_sleep_mode"] = True
    return args | ({} if gib is None else {"kv_cache_memory_bytes": int(gib * GIB)})


# Of a model whose tokenizers AutoTokenizer does not build anew, and that says that its files need no mending.
_CONFIG = {"model_type": "llama", "transformers_version": "5.0.0"}


def tokenizer_args(settings: EngineSettings, folder: str) -> dict[str, Any]:
    """Return vLLM's arguments for its tokenizer, which `folder` then holds in a form that AutoTokenizer reads as it is.

    vLLM's processes load the tokenizer by name, and by AutoTokenizer. One that transformers or the model's own code
    makes is made in the same way by vLLM.
    """
    if not settings.needs_tokenizer:
        return {"skip_tokenizer_init": True}
    if not is_read_as_it_is(Path(settings.model.path), trust_remote_code=settings.model.trust_remote_code):
        return {}
    tokenizer = load_tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
    tokenizer.save_pretrained(folder)
    (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
    return {"tokenizer": folder, "tokenizer_mode": "hf"}  # and no form of its own for some architectures


# Engine steps in a trace: each has all operators of a forward pass, and responses take thousands.
MOST_STEPS = 256


def profiler_args(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments of an engine that may be profiled; none of one that may not."""
    if settings.profile_dir is None:
        return {}
    from vllm.config import ProfilerConfig

    config = ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=settings.profile_dir,
        torch_profiler_with_stack=False,  # or each event holds its Python stack
        torch_profiler_dump_cuda_time_total=False,  # a table on the console
        ignore_frontend=True,  # vLLM's asyncio code is not what takes time
        max_iterations=MOST_STEPS,
    )
    return {"profiler_config": config}


def clear_traces(settings: EngineSettings) -> None:
    """Remove what a profile that was not ended may have left behind."""
    if settings.profile_dir is not None:
        shutil.rmtree(settings.profile_dir, ignore_errors=True)


def take_traces(settings: EngineSettings, path: Path) -> None:
    """Move what vLLM has written to `path`; of an engine of several processes, each one's to a file of its own."""
    folder = Path(settings.profile_dir or "")
    traces = sorted(folder.glob("*.json.gz"), key=lambda file: (len(file.name), file.name))
    if not traces:
        raise EngineError(
            f"vLLM has written no trace into {folder}: it has no worker with a profiler, or "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.profiler_config is set, which wins"
        )
    name = path.name.removesuffix(".json.gz")
    try:
        for number, trace in enumerate(traces):
            trace.replace(path if len(traces) == 1 else path.with_name(f"{name}_worker{number}.json.gz"))
        shutil.rmtree(folder)
    except OSError as error:
        raise EngineError(f"the trace {path} cannot be written: {error}") from None
