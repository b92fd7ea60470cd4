"""What vLLM's own config makes of a run's settings on GPUs. There is none here: vLLM is told that there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.config.load import load_config
from grpo_dist.config.placement import placement
from grpo_dist.engines.vllm.arguments import quiet_environment
from grpo_dist.trainer.settings import engine_settings

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 64.0, "original_max_position_embeddings": 512}
RUNS = {
    "eight": ["cluster=node8"],
    "one": ["cluster=single_gpu"],
    "asleep": ["cluster=single_gpu", f"{ROLLOUT}.free_cache_engine=true"],
    "unheeded": ["cluster=node8", f"{ROLLOUT}.free_cache_engine=true"],
    "split": ["cluster=node8", f"{ROLLOUT}.tensor_model_parallel_size=2", "actor_rollout_ref.nccl_timeout=77"],
    "eager": ["cluster=node8", f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.max_num_seqs=32"],
    "unchunked": [
        "cluster=node8",
        f"{ROLLOUT}.enable_chunked_prefill=false",
        f"{ROLLOUT}.max_num_batched_tokens=64",
        f"{ROLLOUT}.max_num_seqs=64",
        f"{ROLLOUT}.kv_cache_memory_gib=1.5",
        f"{ROLLOUT}.gpu_memory_utilization=0.5",
        f"{ROLLOUT}.dtype=fp16",
    ],
    "long": [
        *("cluster=node8", "data.max_response_length=30000", f"{ROLLOUT}.max_model_len=32768"),
        *(f"{ROLLOUT}.enable_chunked_prefill=true", f"{ROLLOUT}.max_num_batched_tokens=2048"),
        f"{MODEL}.override_config.max_position_embeddings=32768",
        f"{MODEL}.override_config.rope_parameters={{{', '.join(f'{name}: {value}' for name, value in YARN.items())}}}",
    ],
    "own": ["cluster=node8", f"{ROLLOUT}.engine_kwargs.vllm={{compilation_config: {{cudagraph_mode: PIECEWISE}}}}"],
}


def settings(overrides: list[str]) -> dict[str, Any]:
    config, _ = load_config([f"{ROLLOUT}.kv_cache_memory_gib=null", *overrides])  # the built-in model names a size
    found = engine_settings(config, placement(config), 0)
    return asdict(replace(found, model_path=resolve_model_path(found.model_path)))


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By run: the parts of vLLM's config that tests/engines/vllm/faked_gpu.py shows."""
    file = tmp_path_factory.mktemp("settings") / "runs.json"
    file.write_text(json.dumps({name: settings(overrides) for name, overrides in RUNS.items()}))
    command = [sys.executable, "-m", "tests.engines.vllm.faked_gpu", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_defaults_are_fast_and_the_log_probs_those_of_the_sampled_distribution(on_gpus) -> None:
    found = on_gpus["eight"]
    assert (found["device"], found["dtype"]) == ("cuda", "torch.bfloat16")
    assert (found["cuda_graphs"], found["compilation"]) == ("FULL_AND_PIECEWISE", "VLLM_COMPILE")
    assert not found["enforce_eager"]
    assert found["largest_graph"] >= found["max_num_seqs"] == 256, "a full batch decodes in one graph"
    assert found["prefix_caching"], "the responses to a prompt share its cache"
    assert found["chunked_prefill"]
    assert found["max_num_batched_tokens"] == 8192
    assert found["logprobs"] == "processed_logprobs"
    assert (found["gpu_memory_utilization"], found["kv_cache_memory_bytes"]) == (0.8, None)
    assert found["weights"] == "grpo_dist_broadcast"


def test_one_gpu_leaves_memory_to_the_other_roles(on_gpus) -> None:
    config, _ = load_config(RUNS["one"])
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    assert 0 < share <= 0.5
    assert on_gpus["one"]["gpu_memory_utilization"] == share
    assert on_gpus["one"] | {"gpu_memory_utilization": 0.8} == on_gpus["eight"]


def test_an_engine_that_shares_its_gpu_can_give_its_memory_back(on_gpus) -> None:
    assert on_gpus["asleep"] == on_gpus["one"] | {"sleep_mode": True}
    assert on_gpus["unheeded"] == on_gpus["eight"], "its GPU is its own"
    assert not on_gpus["eight"]["sleep_mode"]


def test_several_gpus_are_processes_of_the_engine_also_in_a_placement_group(on_gpus) -> None:
    """vLLM's own choice there would be Ray, which refuses a bundle of several GPUs."""
    split, one = on_gpus["split"], on_gpus["eight"]
    assert (split["executor"], split["executor_class"], split["processes"]) == ("mp", "MultiprocExecutor", 2)
    assert (one["executor"], one["executor_class"], one["processes"]) == ("uni", "UniProcExecutor", 1)
    assert (split["timeouts"], one["timeouts"]) == ([77, 77], [None, None]), "of NCCL's groups and of gloo's"
    same = {"executor", "executor_class", "processes", "timeouts"}
    assert {k: v for k, v in split.items() if k not in same} == {k: v for k, v in one.items() if k not in same}


def test_what_the_config_says_is_what_vllm_does(on_gpus) -> None:
    eager, unchunked = on_gpus["eager"], on_gpus["unchunked"]
    assert eager["enforce_eager"]
    assert (eager["cuda_graphs"], eager["compilation"], eager["max_num_seqs"]) == ("NONE", "NONE", 32)
    assert not unchunked["chunked_prefill"]
    assert unchunked["max_num_batched_tokens"] == 128, "the longest sequence: prompts are not cut"
    assert unchunked["kv_cache_memory_bytes"] == 3 << 29
    assert unchunked["gpu_memory_utilization"] == 0.01, "or vLLM would not start where half of the GPU is not free"
    assert unchunked["dtype"] == "torch.float16"
    assert on_gpus["own"]["cuda_graphs"] == "PIECEWISE"


def test_a_long_context_is_cut_into_chunks_and_its_positions_are_scaled(on_gpus) -> None:
    found = on_gpus["long"]
    assert (found["max_model_len"], found["chunked_prefill"], found["max_num_batched_tokens"]) == (32768, True, 2048)
    assert found["rope"] == YARN
    assert on_gpus["eight"]["rope"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    quiet_environment("cuda")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    quiet_environment("cpu")
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
