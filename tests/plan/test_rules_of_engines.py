"""What is given to vLLM as it is: refused where it belongs to a key or changes seeded tokens, else noted or taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.messages import says
from tests.plan.asked import load, notes, overrides, refused, rows

TWICE = """
# what keys of the config say
vllm.tensor_parallel_size=2 | rollout.tensor_model_parallel_size
vllm.pipeline_parallel_size=2 | rollout.tensor_model_parallel_size
vllm.prefill_context_parallel_size=2 | rollout.tensor_model_parallel_size
vllm.nnodes=2 | rollout.tensor_model_parallel_size
vllm.data_parallel_size=2 | cluster.rollout_world_size
vllm.enable_expert_parallel=true | experts
vllm.enable_eplb=true | out
vllm.enable_return_routed_experts=true | actor.router_replay.mode=R3
vllm.distributed_executor_backend=ray | out
vllm.distributed_executor_backend=uni | out
vllm.model=other | model.path
vllm.hf_config_path=other | model.path
vllm.hf_overrides={max_position_embeddings:4096} | model.override_config
vllm.tokenizer=other | model.path
vllm.tokenizer_mode=slow | model.path
vllm.skip_tokenizer_init=true | rollout.stop
vllm.dtype=float16 | rollout.dtype
vllm.max_model_len=64 | rollout.max_model_len
vllm.seed=1 | trainer.seed
vllm.logprobs_mode=raw_logprobs | out
vllm.generation_config=auto | rollout.temperature
vllm.override_generation_config={temperature:0.5} | rollout.temperature
# the type of the output layer has one key
| hf_overrides  model.override_config | +vllm.hf_overrides={head_dtype: bfloat16}
model.head_dtype=bf16 | fp32
model.head_dtype=fp16 | float32
model.head_dtype=null | model.override_config={head_dtype:bfloat16} | +model.override_config.head_dtype=bfloat16
model.head_dtype=fp32 | model.override_config={head_dtype:bfloat16} | +model.override_config.head_dtype=bfloat16
model.head_dtype=fp32  actor.fsdp_config.model_dtype=bf16 | null
"""


@pytest.mark.parametrize(("run", "parts"), rows(TWICE))
def test_what_keys_of_the_config_say_is_not_said_twice(run: list[str], parts: list[str]) -> None:
    says(refused(*run), *parts)


def test_the_type_of_the_output_layer_is_float32_or_that_of_the_others() -> None:
    assert [load(run).actor_rollout_ref.model.head_dtype for run in ("model.head_dtype=float32", "")] == ["fp32", None]


def test_engines_that_record_no_experts_have_none_to_replay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    replay, path = "actor.router_replay.mode=R3", f"model.path={tmp_path}"
    for why in (
        "rollout.name=my.engines:Engine",
        "vllm.enable_prefix_caching=false",
        "vllm.scheduler_cls=my.Scheduler",
    ):
        remedy = "disabled" if "rollout.name" in why else "leave"
        says(refused(path, replay, why), *overrides(replay, why), remedy)
    load(path, "vllm.enable_prefix_caching=false")
    load(path, "vllm.scheduler_cls=my.Scheduler")


@pytest.mark.parametrize("argument", ["spec_method=ngram", "spec_tokens=3", "speculative_config={method:ngram}"])
def test_drafts_are_refused_with_seeded_samples_and_noted_otherwise(argument: str) -> None:
    """A seed is on by default on CPU, and off on GPUs."""
    given, (key,) = f"vllm.{argument}", overrides(f"vllm.{argument.partition('=')[0]}")
    default, asked = overrides("rollout.deterministic=null", "rollout.deterministic=true")
    says(refused(given), key, default, "CPU", "deterministic=false")
    says(refused("cluster=node8", given, asked), key, asked, "deterministic=false")
    for where in ("rollout.deterministic=false", "cluster=node8"):
        says(notes(where, given), key, "seeds")
    load(f"{key}=null")


@pytest.mark.parametrize(
    ("argument", "plain"),
    [
        ("quantization=fp8", "quantization=null"),
        ("kv_cache_dtype=fp8", "kv_cache_dtype=auto"),
        ("logits_processors=[mine:Processor]", "logits_processors=[]"),
        ("watermark_config={algorithm:kgw}", "watermark_config=null"),
    ],
)
def test_samples_of_another_distribution_are_noted(argument: str, plain: str) -> None:
    said = notes(f"vllm.{argument}")
    says(said, *overrides(f"vllm.{argument}"), "training/rollout_probs_diff_*", "algorithm.rollout_correction")
    assert not [note for note in notes(f"vllm.{plain}") if "engine_kwargs" in note]


def test_what_changes_speed_alone_is_taken_without_a_word() -> None:
    given = "vllm.enable_prefix_caching=false  vllm.async_scheduling=false  vllm.max_logprobs=5  vllm.block_size=32"
    assert not [note for note in notes(given) if "engine_kwargs" in note]
