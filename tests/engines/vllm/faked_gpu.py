"""What vLLM makes of a run's arguments where its CUDA platform is told of 8 GPUs: `python -m ...faked_gpu FILE`."""

import json
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType, NoneType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from grpo_dist.assets import resolve_model_path
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.plan.plan import make_plan
from tests.plan.asked import load
from tests.worker_settings import changed

EXPERTS = Path(__file__).with_name("experts")  # a config.json without weights
PARTS = (  # of vLLM's config
    *("device_config.device_type", "use_v2_model_runner", "weight_transfer_config.backend"),
    *("compilation_config.mode", "compilation_config.cudagraph_mode", "model_config.enforce_eager"),
    *("cache_config.enable_prefix_caching", "cache_config.gpu_memory_utilization"),
    *("cache_config.kv_cache_memory_bytes", "model_config.enable_sleep_mode"),
    *("scheduler_config.enable_chunked_prefill", "scheduler_config.async_scheduling"),
    *("scheduler_config.max_num_batched_tokens", "scheduler_config.max_num_seqs", "model_config.max_model_len"),
    *("model_config.dtype", "model_config.head_dtype", "model_config.logprobs_mode", "model_config.quantization"),
    *("parallel_config.distributed_executor_backend", "parallel_config.world_size"),
    *("parallel_config.distributed_timeout_seconds", "parallel_config.cpu_distributed_timeout_seconds"),
    "aux_output_config.enabled",  # experts are recorded
)
R3, FP8 = "actor.router_replay.mode=R3", "vllm.quantization=fp8"
YARN = "{rope_type: yarn, rope_theta: 10000.0, factor: 64.0, original_max_position_embeddings: 512}"
RUNS = {
    "eight": "cluster=node8",
    "one": "cluster=single_gpu",
    "asleep": "cluster=single_gpu  rollout.free_cache_engine=true",
    "unheeded": "cluster=node8  rollout.free_cache_engine=true",
    "split": "cluster=node8  rollout.tensor_model_parallel_size=2  actor_rollout_ref.nccl_timeout=77",
    "eager": "cluster=node8  rollout.enforce_eager=true  rollout.max_num_seqs=32",
    "unchunked": "cluster=node8  rollout.enable_chunked_prefill=false  rollout.max_num_batched_tokens=64  "
    "rollout.max_num_seqs=64  rollout.kv_cache_memory_gib=1.5  rollout.dtype=fp16  rollout.gpu_memory_utilization=0.5",
    "long": "cluster=node8  data.max_response_length=30000  rollout.max_model_len=32768  model.head_dtype=fp32  "
    "rollout.enable_chunked_prefill=true  rollout.max_num_batched_tokens=2048  "
    f"model.override_config.max_position_embeddings=32768  model.override_config.rope_parameters={YARN}",
    "own": "cluster=node8  vllm.compilation_config={cudagraph_mode: PIECEWISE}",
    "seeds": "cluster=node8  rollout.deterministic=true",
    "drafts": "cluster=node8  vllm.spec_method=ngram  vllm.spec_tokens=4",
    "routes": f"cluster=node8  model.path={EXPERTS}  {R3}",
    "factors": "cluster=single_gpu  model.lora_rank=8  model.lora.merge=false",
    # at level 1: its weights stay
    "factors_asleep": "cluster=single_gpu  model.lora_rank=8  model.lora.merge=false  rollout.free_cache_engine=true",
    "fp8": f"cluster=node8  {FP8}",
}
# Rows for which vLLM asks its kernels for GPUs, so that its build for CPU cannot resolve them.
BY_KERNELS = {"factors", "factors_asleep", "fp8", "float32 by fp8"}
# What vLLM refuses: a run, changes of its engine's settings, and the override, or variable, that asks for them.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "routes uncached": ("routes", {"vllm": {"enable_prefix_caching": False}}, "vllm.enable_prefix_caching=false"),
    "routes by the other runner": ("routes", {}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    "routes without experts": ("eight", {"records_routes": True}, R3),
    "heads in eight parts": ("eight", {"tensor_model_parallel_size": 8}, "rollout.tensor_model_parallel_size=8"),
    "float32 by fp8": ("fp8", {"dtype": "float32"}, "rollout.dtype=float32"),
}


def settings(run: str, **changes: Any) -> EngineSettings:
    """An engine's settings in a run, with changes that the run's rules may refuse."""
    found = make_plan(load("rollout.kv_cache_memory_gib=null", run)).engine(0)  # the built-in model names a size
    return changed(found, path=resolve_model_path(found.model.path), **changes)


def fake() -> None:
    """Before vLLM asks what it runs on."""
    import ray.util
    import vllm.platforms

    has_kernels = find_spec("vllm._C_stable_libtorch") is not None
    if not has_kernels:
        sys.modules["vllm._C_stable_libtorch"] = ModuleType("kernels")
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakedGPU(NonNvmlCudaPlatform):
        """An H100, as far as a config asks."""

        get_device_capability = staticmethod(lambda device_id=0: DeviceCapability(9, 0))
        get_device_name = staticmethod(lambda device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = staticmethod(lambda device_id=0: 80 << 30)
        device_count = staticmethod(lambda: 8)
        if not has_kernels:
            is_cumem_allocator_available = staticmethod(lambda: True)

    vllm.platforms._current_platform = FakedGPU()
    ray.is_initialized = lambda: True
    ray.get_runtime_context = lambda: SimpleNamespace(runtime_env=None)
    ray.util.get_current_placement_group = lambda: "a bundle with all GPUs of the engine"
    if not has_kernels:
        import vllm.config.vllm  # only now: it asks what it runs on

        vllm.config.vllm.HAS_TRITON = True  # by which it chooses its model runner


def resolved(settings: EngineSettings) -> dict[str, Any]:
    """The parts of vLLM's config that decide about speed, memory and log-probs."""
    from vllm.v1.executor.abstract import Executor

    from grpo_dist.engines.vllm.arguments import engine_args

    config = engine_args(settings, folder="").create_engine_config()
    lora, sizes = config.lora_config, config.compilation_config.cudagraph_capture_sizes
    found = {
        "largest_graph": max(sizes or [0]),
        "executor_class": Executor.get_class(config).__name__,
        "rope": config.model_config.hf_text_config.rope_parameters,
        "lora": lora and [lora.max_loras, lora.max_lora_rank, *lora.target_modules],
    }
    plain, parts = (int, float, bool, NoneType), {part: attrgetter(part)(config) for part in PARTS}
    return found | {name: part if type(part) in plain else str(part) for name, part in parts.items()}


def look_at(model: str) -> None:
    """Have vLLM look at a model's class unfaked: a GPU's kernels are not here."""
    code = f"from vllm import EngineArgs; EngineArgs({model!r}, skip_tokenizer_init=True).create_model_config()"
    subprocess.run([sys.executable, "-c", code], check=True)


def every_row() -> dict[str, tuple[EngineSettings, str]]:
    """By name: the settings of an engine, and a variable of its environment as NAME=VALUE, or ""."""
    rows = {name: (settings(run), "") for name, run in RUNS.items()}
    for name, (run, changes, said) in REFUSED.items():
        rows[name] = (settings(RUNS[run], **changes), said if said.startswith("VLLM_") else "")
    return rows


def answer(settings: EngineSettings, variable: str) -> dict[str, Any] | str:
    """What vLLM makes of a row: its config, or the reason why it refuses it."""
    try:
        with patch.dict(os.environ, dict([variable.split("=")]) if variable else {}):
            return resolved(settings)
    except ValueError as error:  # what pydantic raises is one too
        (reason,) = [line for line in str(error).splitlines() if " error, " in line]
        return reason.strip().partition(" [type=")[0]


def answers(rows: dict[str, tuple[EngineSettings, str]]) -> dict[str, dict[str, Any] | str]:
    """Of this process's vLLM, which is faked for good."""
    from grpo_dist.engines.vllm.starting import quiet_environment

    quiet_environment("cuda")
    fake()
    return {name: answer(*row) for name, row in rows.items()}


if __name__ == "__main__":
    rows = pickle.loads(Path(sys.argv[1]).read_bytes())
    for model in {settings.model.path for settings, _ in rows.values()}:
        look_at(model)
    print(json.dumps(answers(rows)))
