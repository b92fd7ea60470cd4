"""The estimate of a step, worked out by hand for a model of one layer, and who waits."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.config.step_estimate import (
    BANDWIDTH,
    DECODE_OVERHEAD_S,
    FLOPS,
    GPU_GIB,
    NETWORK,
    NVLINK,
    SYNC,
    StepEstimate,
    step_estimate,
)
from grpo_dist.sizes import GIB

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
# 4 heads of 256; layer: 4 * 1024^2 + 3 * 1024 * 4096 + 2 * 1024 numbers; embedding and head: 32,000 * 1024 each.
MODEL = {"hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 4096,
         "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip
LAYER, HEAD = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024, 32000 * 1024
BYTES = 2.0 * (LAYER + 2 * HEAD + 1024)
# 64 prompts of 100 (of at most 200) tokens with 8 responses of 300 (of at most 600).
RUN = ("cluster=node8", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32", f"{ROLLOUT}.n=8",
       "data.max_prompt_length=200", "data.max_response_length=600",
       "actor_rollout_ref.model.override_config.max_position_embeddings=1024",
       f"{ROLLOUT}.kv_cache_memory_gib=null")  # fmt: skip
TOKENS = 64 * 100 + 512 * 300
FORWARD = 2.0 * (LAYER - 2 * 1024 + HEAD) + 2.0 * 1024 * 400  # matrices, and attention to half of 400 tokens twice


def estimate(*overrides: str, model: dict[str, Any] | None = None) -> StepEstimate:
    config, _ = load_config([*RUN, *overrides])
    found = step_estimate(config, MODEL | (model or {}))
    assert found is not None
    return found


def test_every_phase_by_hand() -> None:
    """4 actor ranks with the reference beside them, 4 engines; computing takes longer than exchanging weights."""
    big = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", f"{REF}.log_prob_micro_batch_size_per_gpu=128")
    phases = estimate(*big).phases
    assert phases["update"] == pytest.approx(3 * TOKENS / 4 * FORWARD / FLOPS)
    assert phases["reference"] == phases["old log-probs"] == pytest.approx(TOKENS / 4 * FORWARD / FLOPS)
    assert phases["weight sync"] == BYTES / SYNC["broadcast"]
    kv = 2 * 1024 * 2.0 * 400  # keys and values of a sequence: 128 of them run at once
    step = (BYTES + 128 * kv) / BANDWIDTH + DECODE_OVERHEAD_S
    last = (BYTES + kv) / BANDWIDTH + DECODE_OVERHEAD_S
    assert phases["generation"] == pytest.approx(16 * 100 * FORWARD / FLOPS + 300 * step + 300 * last)


def test_recomputed_layers_lora_and_epochs() -> None:
    size = f"{ACTOR}.ppo_micro_batch_size_per_gpu=64"
    update = estimate(size).phases["update"]
    checkpointing = estimate(size, "actor_rollout_ref.model.enable_gradient_checkpointing=true").phases["update"]
    assert checkpointing == pytest.approx(update * 4 / 3)
    lora = estimate(size, "actor_rollout_ref.model.lora_rank=8")
    assert lora.phases["update"] == pytest.approx(update * 2 / 3)
    assert lora.phases["reference"] == pytest.approx(update / 3), "by the actor, without its factors"
    assert estimate(size, f"{ACTOR}.ppo_epochs=2").phases["update"] == pytest.approx(2 * update)


def test_a_token_meets_the_experts_that_it_goes_to() -> None:
    """2 of 16 experts, and the router; all 16 are sent to the engines."""
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "model_type": "qwen3_moe"}
    big = f"{ACTOR}.ppo_micro_batch_size_per_gpu=64"
    found = estimate(big, model=experts).phases
    layer = 4 * 1024**2 + 2 * 3 * 1024 * 512 + 16 * 1024
    forward = 2.0 * (layer + HEAD) + 2.0 * 1024 * 400
    assert found["reference"] == pytest.approx(TOKENS / 4 * forward / FLOPS)
    numbers = 4 * 1024**2 + 16 * 3 * 1024 * 512 + 16 * 1024 + 2 * 1024 + 2 * HEAD + 1024
    assert found["weight sync"] == pytest.approx(2 * numbers / SYNC["broadcast"])


def test_small_passes_wait_for_weights() -> None:
    """2 mini-batches of 64 sequences a rank, one at a time: gathered twice, gradients reduced in float32."""
    small = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
    exchanged = 128 * 4 * BYTES * 3 / 4 / NVLINK
    assert estimate(small).phases["update"] == pytest.approx(exchanged)
    budget = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    assert estimate(small, *budget).phases["update"] == pytest.approx(3 * TOKENS / 4 * FORWARD / FLOPS)
    far = ("cluster=multi_node", "trainer.nnodes=2", "cluster.actor_world_size=16", "cluster.colocate=all")
    assert estimate(small, *far).phases["update"] == pytest.approx(32 * 4 * BYTES * 15 / 16 / NETWORK)


def test_the_cache_limits_how_many_sequences_run() -> None:
    """A cache for 16 sequences of 400 tokens: 128 sequences take eight times as many steps."""
    kv = 2 * 1024 * 2.0 * 400
    phases = estimate(f"{ROLLOUT}.kv_cache_memory_gib={16 * kv / GIB}").phases
    step = (BYTES + 16 * kv) / BANDWIDTH + DECODE_OVERHEAD_S
    last = (BYTES + kv) / BANDWIDTH + DECODE_OVERHEAD_S
    assert phases["generation"] == pytest.approx(16 * 100 * FORWARD / FLOPS + 8 * 300 * step + 300 * last)
    share = (BYTES + 16 * kv) / GIB / GPU_GIB
    of_the_gpu = estimate(f"{ROLLOUT}.gpu_memory_utilization={share}").phases
    assert of_the_gpu["generation"] == pytest.approx(phases["generation"])


def test_what_runs_side_by_side() -> None:
    found = estimate()
    phases = found.phases
    log_probs = phases["reference"] + phases["old log-probs"]
    beside = max(phases["generation"], log_probs)
    assert found.total == pytest.approx(beside + phases["update"] + phases["weight sync"])
    assert found.waiting["rollout"] == pytest.approx(1 - phases["generation"] / found.total)
    assert found.waiting["actor"] == pytest.approx(1 - (log_probs + phases["update"]) / found.total)
    ahead = estimate("trainer.max_staleness=1")
    trains = ahead.phases["update"] + ahead.phases["reference"] + ahead.phases["old log-probs"]
    longest = max(ahead.phases["generation"], trains)
    assert ahead.total == pytest.approx(longest + ahead.phases["weight sync"])
    own = estimate("cluster.ref_world_size=1")
    assert own.phases["reference"] == pytest.approx(4 * phases["reference"], rel=0.3)
    assert own.waiting["ref"] == pytest.approx(1 - own.phases["reference"] / own.total)
    scorer = ("reward_model.enable=true", "reward_model.model.path=Skywork/Skywork-Reward-Llama-3.1-8B")
    scored = estimate(*scorer)
    beside = scored.phases["reward model"] + log_probs
    assert scored.waiting["actor"] == pytest.approx(1 - (beside + scored.phases["update"]) / scored.total)
    apart = estimate(*scorer, "cluster.reward_model_world_size=1", "cluster.ref_world_size=1")
    assert apart.waiting["reward_model"] == pytest.approx(1 - apart.phases["reward model"] / apart.total)
    taught = estimate("actor_rollout_ref.ref.model.path=Qwen/Qwen3-8B")
    assert taught.phases["reference"] > 5 * phases["reference"]
    assert taught.phases["old log-probs"] == phases["old log-probs"]
    values = ("recipe=ppo", "critic.model.path=Qwen/Qwen3-8B")
    criticised = estimate(*values)
    assert criticised.phases["critic update"] > criticised.phases["values"] > 0
    updates = criticised.phases["update"] + criticised.phases["critic update"]
    passes = sum(criticised.phases[name] for name in ("reference", "old log-probs", "values"))
    assert criticised.waiting["actor"] == pytest.approx(1 - (passes + updates) / criticised.total)
    its_own = estimate(*values, "cluster.critic_world_size=1", "cluster.ref_world_size=1")
    busy = its_own.phases["values"] + its_own.phases["critic update"]
    assert its_own.waiting["critic"] == pytest.approx(1 - busy / its_own.total)
    together = estimate("cluster.colocate=all", f"{ROLLOUT}.gpu_memory_utilization=0.4")
    assert together.total == pytest.approx(sum(together.phases.values()))
    assert together.waiting == {}


def test_nothing_is_said_of_a_cpu_or_an_unknown_model() -> None:
    config, _ = load_config([])
    assert step_estimate(config, MODEL) is None
    config, _ = load_config([*RUN])
    assert step_estimate(config, {"n_embd": 8}) is None
    assert step_estimate(config, None) is None
    assert "reference" not in estimate(f"{ACTOR}.use_kl_loss=false").phases
