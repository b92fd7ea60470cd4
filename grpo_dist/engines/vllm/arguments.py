"""What vLLM is started with: its arguments, from an engine's settings.

Its tokenizer is the one that prompts are made with. Its own torch profiler must know the folder of traces when the
engine is made, and names the files itself: so an engine has a folder of its own, from which its traces are taken.

Where LoRA's factors are sent, every request runs with the one adapter, also before the first sync, when its factors are
0: the next sync changes them under running requests, which could not change their adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs, ModelRegistry
from vllm.config import ProfilerConfig, WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import supports_lora

from grpo_dist.assets.model_folder import (
    has_delta_nets,
    is_read_as_it_is,
    load_tokenizer,
    read_header,
    read_object,
    text_config,
    weight_files,
)
from grpo_dist.config.schema_roles import ALL_LINEAR, LoraSection
from grpo_dist.engines.base import rollout_backend
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.starting import ARGUMENTS_KEY, KNOWN_VERSION, knows_internals
from grpo_dist.errors import ConfigError, EngineError
from grpo_dist.sizes import CPU_KV_CACHE_GIB, GIB, KV_BLOCK_TOKENS, engine_lora_rank

# With a given size of the KV cache vLLM uses this share only to refuse to start on a full GPU, which starting.py
# checks instead.
UNCHECKED_SHARE = 0.01
BACKEND = "grpo_dist"  # name of our weight transfer in vLLM's factory
# By name, since they import what only vLLM's workers need: by `actor_rollout_ref.model.head_dtype`.
WORKER_EXTENSIONS = {
    None: "grpo_dist.engines.vllm.weight_backend.WorkerExtension",
    "fp32": "grpo_dist.engines.vllm.float32_head.WorkerExtension",
}
RECORDING_SCHEDULER = "grpo_dist.engines.vllm.routed_experts.RecordingScheduler"


def engine_args(settings: EngineSettings, *, folder: str, usual: Mapping[str, Any] | None = None) -> AsyncEngineArgs:
    """Return the `AsyncEngineArgs` of an engine; `usual` ones win, and the config's `engine_kwargs` over all.

    Args:
        folder: that `prepare` has made, for its tokenizer.
    """
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
        **(recording_args(settings.device) if settings.records_routes else {}),
        **(usual or {}),
    }
    head = {"head_dtype": "float32"} if settings.model.head_dtype else {}
    changes = settings.model.override_config
    model_config = read_object(Path(settings.model.path, "config.json"), settings.model.path)
    if settings.device == "cpu" and has_delta_nets(model_config):
        args["enable_prefix_caching"] = False  # it takes chunked prefill
    if text_config(model_config) is not model_config:
        # pictures come as the model's own processor makes them, and go into no cache
        as_they_are = {"mm_processor_cache_gb": 0, "mm_device_do_normalize": False}
        args |= as_they_are if settings.sees_images else {"language_model_only": True}
        changes = {"text_config": changes} if changes else {}
    if overrides := changes | head:
        args["hf_overrides"] = overrides
    own = rollout_backend(settings.rollout.name).given(settings.rollout)
    try:
        return AsyncEngineArgs(**args | own)
    except TypeError as error:  # an argument that vLLM does not have
        raise ConfigError(f"{ARGUMENTS_KEY}: {error}; given: {', '.join(own)}") from None


def recording_args(device: str) -> dict[str, Any]:
    """Return the arguments of an engine that records experts.

    Raises:
        ConfigError: the installed vLLM is another one than the one whose internals are known.
    """
    if device != "cpu":
        return {"enable_return_routed_experts": True}
    if not knows_internals():
        what = "actor_rollout_ref.actor.router_replay.mode=R3: on CPU experts are recorded"
        raise ConfigError(f"{what} with vLLM {KNOWN_VERSION}x only; install that one")
    return {"scheduler_cls": RECORDING_SCHEDULER}


def _batching(settings: EngineSettings) -> dict[str, Any]:
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
    args: dict[str, Any] = {
        "tensor_parallel_size": settings.rollout.tensor_model_parallel_size,
        "worker_extension_cls": WORKER_EXTENSIONS[settings.model.head_dtype],
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
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
    cpu = settings.device == "cpu"
    gib = settings.rollout.kv_cache_memory_gib or (CPU_KV_CACHE_GIB if cpu else None)
    share = settings.rollout.gpu_memory_utilization if gib is None else UNCHECKED_SHARE
    args: dict[str, Any] = {"block_size": KV_BLOCK_TOKENS["cpu"]} if cpu else {"gpu_memory_utilization": share}
    if settings.sleeps:
        args["enable_sleep_mode"] = True
    return args | ({} if gib is None else {"kv_cache_memory_bytes": int(gib * GIB)})


# --- LoRA -----------------------------------------------------------------------------------------------------------
KEY = "actor_rollout_ref.model.lora.merge"
REMEDY = f"set {KEY}=true"
# Tensors of two dimensions in model files that are no linear layers, or whose factors are not taken: embeddings, output
# layers and routers, by the last part of the module's name.
_NOT_LINEAR = {"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "gate"}


def adapter_args(settings: EngineSettings) -> dict[str, Any]:
    """VLLM's arguments for one adapter; {} where merged weights are sent."""
    if settings.lora is None:
        return {}
    folder = Path(settings.model.path)
    for name in json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ():
        known = ModelRegistry.models.get(name)
        if known is not None and not supports_lora(known.load_model_cls()):
            raise ConfigError(f"{KEY}=false: vLLM's {name} takes no LoRA adapters; {REMEDY}")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": engine_lora_rank(settings.lora.factors["r"]),
        # else vLLM gives factors to the output layer too, and computes with them
        "lora_target_modules": _layers(folder, settings.lora),
    }


def _layers(folder: Path, lora: LoraSection) -> list[str]:
    """The last parts of the names of the layers that get room for factors."""
    if lora.targets != ALL_LINEAR:
        return sorted({name.rpartition(".")[2] for name in lora.target_modules})
    headers = (read_header(folder / file, str(folder)) for file in weight_files(folder, str(folder)))
    shapes = {name: shape for header in headers for name, shape in header.items()}
    linear = {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and ".experts." not in name
    }
    return sorted(linear - _NOT_LINEAR)


def adapter_request() -> LoRARequest:
    """Return what names the adapter in a request; vLLM asks for a path, and never reads it."""
    return LoRARequest("policy", 1, "policy")


# --- tokenizer ------------------------------------------------------------------------------------------------------
# Of a model whose tokenizers AutoTokenizer does not build anew, and that says that its files need no mending.
_CONFIG = {"model_type": "llama", "transformers_version": "5.0.0"}


def tokenizer_args(settings: EngineSettings, folder: str) -> dict[str, Any]:
    """Return vLLM's arguments for its tokenizer, which `folder` then holds in a form that AutoTokenizer reads as it is.

    vLLM's processes load the tokenizer by name. One that transformers or the model's own code makes vLLM makes too.
    """
    if not settings.needs_tokenizer and not settings.sees_images:
        return {"skip_tokenizer_init": True}
    if not is_read_as_it_is(Path(settings.model.path), trust_remote_code=settings.model.trust_remote_code):
        return {}
    tokenizer = load_tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
    tokenizer.save_pretrained(folder)
    (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
    return {"tokenizer": folder, "tokenizer_mode": "hf"}  # and no form of its own for some architectures


# --- traces ---------------------------------------------------------------------------------------------------------
# Engine steps in a trace: each has all operators of a forward pass, and responses take thousands.
MOST_STEPS = 256


def profiler_args(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments of an engine that may be profiled; none of one that may not."""
    if settings.profile_dir is None:
        return {}
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
            f"{ARGUMENTS_KEY}.profiler_config is set, which wins"
        )
    name = path.name.removesuffix(".json.gz")
    try:
        for number, trace in enumerate(traces):
            trace.replace(path if len(traces) == 1 else path.with_name(f"{name}_worker{number}.json.gz"))
        shutil.rmtree(folder)
    except OSError as error:
        raise EngineError(f"the trace {path} cannot be written: {error}") from None
