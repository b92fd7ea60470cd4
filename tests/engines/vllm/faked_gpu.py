"""What vLLM makes of engines' arguments on GPUs, in a Ray worker: `python -m tests.engines.vllm.faked_gpu FILE`.

No GPU and no Ray is needed: vLLM's own CUDA platform is told that there are eight GPUs with 80 GiB, and vLLM that it is
in a placement group. Nothing is started.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

NUM_GPUS, MEMORY_BYTES = 8, 80 << 30

if __name__ != "__main__":  # what vLLM imports as the platform
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakedGPU(NonNvmlCudaPlatform):
        """An H100, as far as a config asks."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY_BYTES

        def is_cumem_allocator_available(self) -> bool:
            return True  # it comes with the CUDA wheel

        @classmethod
        def device_count(cls) -> int:
            return NUM_GPUS


def fake() -> None:
    """Before vLLM asks what it runs on."""
    import ray.util
    import vllm.platforms

    sys.modules["vllm._C_stable_libtorch"] = ModuleType("kernels")  # of the CUDA wheel
    vllm.platforms.resolve_current_platform_cls_qualname = lambda: "tests.engines.vllm.faked_gpu.FakedGPU"
    ray.is_initialized = lambda: True
    ray.get_runtime_context = lambda: SimpleNamespace(runtime_env=None)
    ray.util.get_current_placement_group = lambda: "a bundle with all GPUs of the engine"
    import vllm.config.vllm  # only now: it asks what it runs on

    vllm.config.vllm.HAS_TRITON = True  # by which it chooses its model runner


def resolved(settings: Any) -> dict[str, Any]:
    """The parts of vLLM's config that decide about speed, memory and log-probs."""
    from vllm.v1.executor.abstract import Executor

    from grpo_dist.engines.vllm.arguments import engine_args

    config = engine_args(settings, folder="").create_engine_config()
    return {
        "device": config.device_config.device_type,
        "cuda_graphs": config.compilation_config.cudagraph_mode.name,
        "largest_graph": max(config.compilation_config.cudagraph_capture_sizes or [0]),
        "compilation": config.compilation_config.mode.name,
        "enforce_eager": config.model_config.enforce_eager,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_model_len": config.model_config.max_model_len,
        "rope": config.model_config.hf_text_config.rope_parameters,
        "logprobs": str(config.model_config.logprobs_mode),
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "executor": config.parallel_config.distributed_executor_backend,
        "executor_class": Executor.get_class(config).__name__,
        "processes": config.parallel_config.world_size,
        "sleep_mode": config.model_config.enable_sleep_mode,
        "timeouts": [
            config.parallel_config.distributed_timeout_seconds,
            config.parallel_config.cpu_distributed_timeout_seconds,
        ],
        "runner_v2": config.use_v2_model_runner,
        "weights": config.weight_transfer_config.backend,
        "dtype": str(config.model_config.dtype),
        "head": str(config.model_config.head_dtype),
    }


def look_at(model: str) -> None:
    """Have vLLM look at a model's class unfaked, and keep what it saw: a GPU's kernels are not here."""
    code = "import sys; from vllm.engine.arg_utils import EngineArgs; EngineArgs(sys.argv[1]).create_model_config()"
    subprocess.run([sys.executable, "-c", code, model], check=True)


if __name__ == "__main__":
    from grpo_dist.engines.vllm.starting import quiet_environment

    every = pickle.loads(Path(sys.argv[1]).read_bytes())
    for model in {settings.model.path for settings in every.values()}:
        look_at(model)
    quiet_environment("cuda")
    fake()
    print(json.dumps({name: resolved(settings) for name, settings in every.items()}))
