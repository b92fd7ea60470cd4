"""Before an engine starts: what the installed torch and vLLM can do, and GPUs' memory, whose NVML is faked."""

import asyncio
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_dist.engines import base
from grpo_dist.engines.base import Footprint, compiler_problem
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm import backend, starting
from grpo_dist.engines.vllm.backend import VLLMBackend, attention_problem
from grpo_dist.engines.vllm.starting import GPU, footprint, gpus, wait_until_free
from grpo_dist.errors import EngineError
from grpo_dist.sizes import GIB
from tests.messages import refuses, says
from tests.worker_settings import changed, engine_settings


def llama_like(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return {"model_type": model_type, **sizes, **changes}


LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
WHOLE_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 8}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (llama_like("llama"), 16),
        (llama_like("llama", head_dim=None, hidden_size=288), 72),
        (llama_like("gemma2", head_dim=16, sliding_window=32), 16),
        ({"model_type": "gemma3", "text_config": llama_like("gemma3_text", head_dim=16)}, 16),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4}, 16),
        ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "global_head_dim": 48}}, 48),
        (llama_like("deepseek_v3", **LATENT), 16),
        # what the build computes, or judges itself
        (llama_like("llama", head_dim=32), None),
        (llama_like("gemma"), None),  # whose heads are of 256 where config.json does not say
        (llama_like("qwen3"), None),
        (llama_like("deepseek_v3", **WHOLE_LATENT), None),
        ({"model_type": "minicpm3"}, None),  # latents of 288, of which vLLM makes whole keys of 96
        ({"model_type": "mamba"}, None),
        ({"model_type": "of_its_own", "hidden_size": 64, "num_attention_heads": 4}, None),
    ],
)
def test_heads_of_other_sizes_are_refused(
    config: dict[str, Any], size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size is None:
        assert attention_problem(config) == ""
    else:
        says(attention_problem(config), size, "head_dim", 32, 128)
        monkeypatch.setattr(backend, "find_spec", lambda name: None)
        assert attention_problem(config) == "", "what cannot be read refuses nothing"


def test_sparse_attention_needs_a_gpu_and_gated_delta_nets_bf16() -> None:
    says(attention_problem({"model_type": "deepseek_v32"}), "index_topk", "GPUs")
    problem = VLLMBackend().model_problem({"linear_key_head_dim": 64}, "cpu", "float32")
    says(problem, "rollout.dtype=float32", "bfloat16")


def test_the_names_are_those_that_vllm_knows() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert VLLMBackend().parser_names() == ToolParserManager.list_registered()


@pytest.mark.parametrize(
    ("device", "cuda", "vllm", "told"),
    [
        ("cpu", None, None, []),
        ("cuda", "13.0", "0.32.0", []),
        ("cpu", "13.0", None, []),
        ("cpu", "13.0", "0.32.0+cpu", []),
        ("cuda", None, None, [torch.__version__, "make setup DEVICE=gpu", "trainer.n_gpus_per_node=0"]),
        ("cpu", "13.0", "0.32.0", ["CUDA 13.0", "cluster=single_gpu", "make setup DEVICE=cpu"]),
    ],
)
def test_the_build_is_one_for_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, cuda: str | None, vllm: str | None, told: list[str]
) -> None:
    def version(name: str) -> str:
        if vllm is None:
            raise PackageNotFoundError(name)
        return vllm

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(backend, "version", version)
    monkeypatch.setattr(base, "compiler_problem", lambda: "")  # whatever this machine has
    found = VLLMBackend().needs(device)
    assert bool(found) == bool(told)
    if told:
        says(found, *told)


def test_nothing_is_missing_here_or_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gcc").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(base.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_problem() == ""
    (tmp_path / "gcc").unlink()
    says(compiler_problem(), "gcc", "CC", "apt-get")
    monkeypatch.setenv("CC", "/opt/cc")
    assert compiler_problem() == ""
    (tmp_path / "Python.h").unlink()
    says(compiler_problem(), f"{tmp_path}/Python.h", "python3-dev")


@pytest.mark.deep
def test_a_class_that_needs_torchvision_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(name: str, parts: dict[str, Any]) -> str:
        return VLLMBackend().model_problem({"architectures": [name], "head_dim": 64, **parts}, "cpu", "float32")

    gemma = ("Gemma3ForConditionalGeneration", {"text_config": {"model_type": "gemma3_text"}})
    monkeypatch.setattr(backend, "find_spec", lambda name: None if name == "torchvision" else find_spec(name))
    assert problem("LlamaForCausalLM", {}) == ""
    assert problem("NewForConditionalGeneration", gemma[1]) == "", "which vLLM judges"
    if find_spec("torchvision") is None:
        says(problem(*gemma), gemma[0], "torchvision")
    monkeypatch.setattr(backend, "find_spec", lambda name: True if name == "torchvision" else find_spec(name))
    assert problem(*gemma) == ""


# --- an engine waits for the memory of its GPUs ------------------------------
# 35 % of the GPU, as cluster=single_gpu has it.
FIRST = engine_settings(device="cuda", gpu_memory_utilization=0.35, kv_cache_memory_gib=None)
REPLACED = changed(FIRST, kv_cache_memory_gib=20.0, footprint_gib=26.5)
GIVEN = changed(FIRST, kv_cache_memory_gib=4.0)


def wait(settings: EngineSettings, *free_gib: tuple[float, ...]) -> tuple[list[float], float]:
    """What is free in the end, and after how many seconds, of which each look at GPUs of 80 GiB finds the next one."""
    seen, last, passed = iter(free_gib), free_gib[0], [0.0]

    def look(count: int) -> list[GPU]:
        nonlocal last
        last = next(seen, last)
        assert len(last) == count
        held = " (held by process 7: 60 GiB)"
        return [GPU(f"GPU {i}", int(free * GIB), 80 * GIB, held) for i, free in enumerate(last)]

    async def sleep(seconds: float) -> None:
        passed.append(seconds)

    with mock.patch.object(starting, "gpus", look), mock.patch.object(asyncio, "sleep", sleep):
        found = asyncio.run(wait_until_free(settings))
    return [gpu.free / GIB for gpu in found], sum(passed)


@pytest.mark.parametrize(
    ("settings", "free", "seconds"),
    [
        (FIRST, [79.0], 0.5),
        (GIVEN, [1.0], 0.5),  # vLLM finds out
        (FIRST, [20.0, 27.9, 28.0, 28.0], 1.5),  # the share that vLLM asks for
        (REPLACED, [20.0, 27.9], 1.0),  # what the one before took
        (REPLACED, [30.0, 26.0, 26.5], 1.5),  # another role lets go of what it had taken for a moment
        (FIRST, [30.0, 50.0, 79.0, 79.0], 1.5),  # a process that was killed still gives back
        (REPLACED, [30.0 + i / 128 for i in range(240)], 120.0),  # it never settles, and suffices all the same
    ],
    ids=["first", "given", "share", "replaced", "moment", "killed", "never"],
)
def test_it_waits_until_that_is_free_and_stays_so(settings: Any, free: list[float], seconds: float) -> None:
    found, waited = wait(settings, *((each,) for each in free))
    assert (found, waited) == ([pytest.approx(free[-1])], seconds)


def test_memory_that_does_not_become_free_on_each_gpu_of_the_engine() -> None:
    two = changed(REPLACED, tensor_model_parallel_size=2)
    assert wait(two, (40.0, 10.0), (40.0, 27.0))[0] == [40, 27]
    with refuses(EngineError, "GPU 1", "10 of 80 GiB", "120 s"):
        wait(two, (40.0, 10.0))
    with refuses(EngineError, "GPU 0", "19.2 of 80 GiB", "120 s", "28", "process 7: 60 GiB") as caught:
        wait(FIRST, (19.25,))
    says(caught, "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.kv_cache_memory_gib")
    says(caught, "lower", "offload", "actor_rollout_ref.actor.fsdp_config")


def test_what_an_engine_took() -> None:
    """On the GPU on which it is more; without the size that vLLM found, the one that it was given."""
    before = [GPU("GPU 0", 79 * GIB, 80 * GIB), GPU("GPU 1", 70 * GIB, 80 * GIB)]
    after = [GPU("GPU 0", 51 * GIB, 80 * GIB), GPU("GPU 1", 41 * GIB, 80 * GIB)]
    assert footprint(FIRST, before, after, 20 * GIB) == Footprint(29.0, 20.0)
    assert footprint(GIVEN, before, after, None) == Footprint(29.0, 4.0)
    with pytest.raises(AssertionError):
        footprint(FIRST, before, after, None)


class NVML:
    """Three GPUs, two processes on the last one."""

    def __init__(self) -> None:
        self.open = 0
        self.names = {"GPU-ab": 2, "GPU-cd": 0}

    class NVMLError(Exception):
        """As the bindings'."""

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return self.names[name]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(free=(handle + 1) * GIB, total=8 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        held = [SimpleNamespace(pid=11, usedGpuMemory=3 << 29), SimpleNamespace(pid=12, usedGpuMemory=None)]
        return held if handle == 2 else []


HELD = " (held by process 11: 1.5 GiB, process 12: some)"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> NVML:
    found = NVML()
    monkeypatch.setattr(starting, "nvml_bindings", lambda: found)
    return found


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("", [("GPU 0", 1, ""), ("GPU 1", 2, "")]),
        ("2,0,1", [("GPU 2", 3, HELD), ("GPU 0", 1, "")]),
        ("GPU-ab,GPU-cd", [("GPU GPU-ab", 3, HELD), ("GPU GPU-cd", 1, "")]),
    ],
)
def test_the_gpus_of_an_engine_of_two_processes(
    visible: str, found: list[Any], nvml: NVML, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus(2) == [GPU(name, free * GIB, 8 * GIB, held) for name, free, held in found]
    assert nvml.open == 0


def test_a_driver_that_does_not_tell_who_holds_memory_is_enough(nvml: NVML, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise NVML.NVMLError("Insufficient Permissions")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert gpus(1) == [GPU("GPU 2", 3 * GIB, 8 * GIB, "")]
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)
    with refuses(EngineError, "memory", "NVML: Insufficient Permissions"):
        gpus(1)
    assert nvml.open == 0


def test_vllm_brings_the_bindings() -> None:
    found = starting.nvml_bindings()
    for name in (each for each in vars(NVML) if each.lower().startswith("nvml")):
        assert callable(getattr(found, name)), name
