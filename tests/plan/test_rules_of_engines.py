"""What is given to vLLM as it is: refused where it belongs to a key or changes seeded tokens, else noted or taken."""

from pathlib import Path

import pytest

from grpo_dist.plan.commands import load_config
from tests.config.refusals import refused
from tests.messages import says

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
UNSEEDED = f"{ROLLOUT}.deterministic=false"


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("tensor_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("pipeline_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("prefill_context_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("data_parallel_size=2", "cluster.rollout_world_size"),
        ("enable_expert_parallel=true", "experts"),
        ("enable_eplb=true", "out"),
        ("enable_return_routed_experts=true", "actor_rollout_ref.actor.router_replay.mode=R3"),
        ("nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("distributed_executor_backend=ray", "out"),
        ("distributed_executor_backend=uni", "out"),
        ("model=other", f"{MODEL}.path"),
        ("hf_config_path=other", f"{MODEL}.path"),
        ("hf_overrides={max_position_embeddings:4096}", f"{MODEL}.override_config"),
        ("tokenizer=other", f"{MODEL}.path"),
        ("tokenizer_mode=slow", f"{MODEL}.path"),
        ("skip_tokenizer_init=true", f"{ROLLOUT}.stop"),
        ("dtype=float16", f"{ROLLOUT}.dtype"),
        ("max_model_len=64", f"{ROLLOUT}.max_model_len"),
        ("seed=1", "trainer.seed"),
        ("logprobs_mode=raw_logprobs", "out"),
        ("generation_config=auto", f"{ROLLOUT}.temperature"),
        ("override_generation_config={temperature:0.5}", f"{ROLLOUT}.temperature"),
    ],
)
def test_what_keys_of_the_config_say_is_not_said_twice(argument: str, remedy: str) -> None:
    says(refused(f"{VLLM}.{argument}"), f"{VLLM}.{argument}", remedy)


def test_engines_that_record_no_experts_have_none_to_replay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    replay, path = "actor_rollout_ref.actor.router_replay.mode=R3", f"{MODEL}.path={tmp_path}"
    own = f"{ROLLOUT}.name=my.engines:Engine"
    says(refused(path, replay, own), replay, own, "disabled")
    for argument in ("enable_prefix_caching=false", "scheduler_cls=my.Scheduler"):
        says(refused(path, replay, f"{VLLM}.{argument}"), replay, f"{VLLM}.{argument}", "leave")
        load_config([path, f"{VLLM}.{argument}"])


@pytest.mark.parametrize("argument", ["spec_method=ngram", "spec_tokens=3", "speculative_config={method:ngram}"])
def test_drafts_are_refused_with_seeded_samples_and_noted_otherwise(argument: str) -> None:
    """A seed is on by default on CPU, and off on GPUs."""
    key = f"{VLLM}.{argument.partition('=')[0]}"
    says(refused(f"{VLLM}.{argument}"), key, f"{ROLLOUT}.deterministic=null", "CPU", "deterministic=false")
    asked = refused("cluster=node8", f"{VLLM}.{argument}", f"{ROLLOUT}.deterministic=true")
    says(asked, key, f"{ROLLOUT}.deterministic=true", "deterministic=false")
    for where in ([UNSEEDED], ["cluster=node8"]):
        says(load_config([*where, f"{VLLM}.{argument}"])[1], key, "seeds")
    load_config([f"{VLLM}.{argument.partition('=')[0]}=null"])


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
    said = load_config([f"{VLLM}.{argument}"])[1]
    says(said, f"{VLLM}.{argument}", "training/rollout_probs_diff_*", "algorithm.rollout_correction")
    assert not [note for note in load_config([f"{VLLM}.{plain}"])[1] if VLLM in note]


def test_what_changes_speed_alone_is_taken_without_a_word() -> None:
    given = ["enable_prefix_caching=false", "async_scheduling=false", "max_logprobs=5", "block_size=32"]
    told = load_config([f"{VLLM}.{argument}" for argument in given])[1]
    assert not [note for note in told if VLLM in note]


def test_the_type_of_the_output_layer_has_one_key() -> None:
    key, entry = f"{MODEL}.head_dtype", f"{MODEL}.override_config"
    assert load_config([f"{key}=float32"])[0].actor_rollout_ref.model.head_dtype == "fp32"
    assert load_config([])[0].actor_rollout_ref.model.head_dtype is None
    says(refused(f"{key}=bf16"), f"{key}=bf16", "fp32")
    says(refused(f"{key}=fp16"), f"{key}=fp16", "float32")
    for head in ("null", "fp32"):
        told = refused(f"+{entry}.head_dtype=bfloat16", f"{key}={head}")
        says(told, f"{entry}={{head_dtype:bfloat16}}", f"{key}={head}")
    says(refused(f"+{VLLM}.hf_overrides={{head_dtype: bfloat16}}"), "hf_overrides", entry)
    weights = "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"
    says(refused(f"{key}=fp32", weights), f"{key}=fp32", weights, "null")
