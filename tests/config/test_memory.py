"""The memory plan: by hand, and against torch's tracker, which follows the engine's own code over fake tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.config.memory import RoleMemory, memory_estimate
from grpo_dist.sizes import GIB
from tests.memory_cells import CELLS, FSDP, MODELS, QUICK, measured, planned, run_config

ROLLOUT = "actor_rollout_ref.rollout"
MODEL, TEACHER = "actor_rollout_ref.model", "actor_rollout_ref.ref.model.path"
# 2 layers of 4 * 8^2 + 3 * 8 * 16 + 2 * 8 = 656 numbers; an embedding and an output layer of 100 * 8, a norm of 8.
SHAPE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 16, "vocab_size": 100, "tie_word_embeddings": False}  # fmt: skip
LAYER, MATRIX = 656, 800
ROOT = 2 * MATRIX + 8
PARAMETERS = 2 * LAYER + ROOT
# A group of 8 responses of 4 tokens after a prompt of 4, which they share; 32 rows of logits in one chunk.
TOKENS, CHUNK = 36, 32 * 100 * 4
INPUTS = TOKENS * 8 * 2
SMALL = ("data.max_prompt_length=4", "data.max_response_length=4", "cluster=node8", "data.train_batch_size=32")


def plan(tmp_path: Path, *overrides: str) -> dict[str, RoleMemory]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config, _ = load_config([f"{MODEL}.path={tmp_path}", *SMALL, *overrides])
    return {role.role: role for role in memory_estimate(config, SHAPE) or []}


def numbers(role: RoleMemory) -> dict[str, float]:
    return {name: pytest.approx(gib * GIB) for name, gib in role.parts.items()}


def test_engines_that_compute_with_factors_hold_them(tmp_path: Path) -> None:
    """Of rank 4, for which vLLM makes room of rank 8: four matrices of 8 * 8 in a layer, and three of 8 * 16."""
    lora = (f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=all-linear")
    merged, apart = (plan(tmp_path, *lora, *more)["rollout"] for more in ((), (f"{MODEL}.lora.merge=false",)))
    factors = 2 * (4 * (8 + 8) + 3 * (8 + 16))
    assert numbers(apart) == numbers(merged) | {"LoRA's factors": pytest.approx(factors * 8 * 2)}
    assert apart.host["new weights"] * GIB == pytest.approx(4 * factors * 4 * 2)
    tokens = [f"actor_rollout_ref.rollout.{limit}=64" for limit in ("max_num_batched_tokens", "max_num_seqs")]
    on_cpu = plan(tmp_path, *lora, f"{MODEL}.lora.merge=false", "cluster=cpu", *tokens)["rollout"]
    assert on_cpu.parts["factors of each token"] * GIB == pytest.approx(64 * 8 * 16 * 4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CELLS]
)
def test_the_plan_is_what_the_tracker_sees(name: str, tmp_path: Path) -> None:
    config = run_config(CELLS[name], tmp_path)
    plan, found = planned(CELLS[name], config), measured(CELLS[name], config)
    assert plan.total == pytest.approx(found["Total"], rel=0.1), (dict(plan.parts), found)


def test_the_head_is_the_peak_of_two_ranks(tmp_path: Path) -> None:
    """A chunk's logits and softmax beside the output layer's gradient, all in float32."""
    actor = plan(tmp_path, "cluster.actor_world_size=2")["actor"]
    assert numbers(actor) == {
        "weights": PARAMETERS * 4 / 2,
        "gradients": PARAMETERS * 4 / 2,
        "optimizer": PARAMETERS * 8 / 2,
        "gathered weights": (ROOT + LAYER) * 2,
        "activations": 2 * INPUTS + 2 * INPUTS,  # what two layers keep, and the output layer's
        "logits": MATRIX * 4 + 2 * CHUNK,
    }


def test_ranks_that_split_sequences_have_their_share_of_the_activations(tmp_path: Path) -> None:
    """A half of the tokens each; where a budget fills a pass, it is twice as large and a rank has what it had."""
    actor, ranks = "actor_rollout_ref.actor", "cluster.actor_world_size=2"
    split = f"{actor}.ulysses_sequence_parallel_size=2"
    for role in ("actor", "ref", "critic"):
        whole, half = (plan(tmp_path, "recipe=ppo", "cluster=node8", ranks, *more)[role] for more in ((), (split,)))
        share = half.parts["activations"] / whole.parts["activations"]
        # the reference's peak is at its logits, of which a few tokens' exist at once
        assert 0.5 < share < 0.6 if role == "ref" else share == pytest.approx(0.5, rel=0.01), role
        same = {"weights", "gradients", "optimizer"} & set(whole.parts)
        assert {part: half.parts[part] for part in same} == {part: whole.parts[part] for part in same}
    budget = (f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_max_token_len_per_gpu=4096")
    assert plan(tmp_path, ranks, *budget)["actor"] == plan(tmp_path, ranks, *budget, split)["actor"]


def test_without_checkpointing_layers_keep_more(tmp_path: Path) -> None:
    actor = plan(tmp_path, "cluster.actor_world_size=2", f"{MODEL}.enable_gradient_checkpointing=false")["actor"]
    # two norms and two of heads in float32, what follows them and the matrices' inputs in bfloat16
    layer = TOKENS * (2 * 8 * (4 + 2 * 2) + (8 + 8) * (4 + 3 * 2) + 4 * 16 * 2)
    assert actor.parts["activations"] * GIB == pytest.approx(2 * layer + 2 * INPUTS)


def test_offloaded_activations_are_in_cpu_memory(tmp_path: Path) -> None:
    """Of two layers the inputs of one are on the GPU; each waits in a pinned block, whose size is a power of two."""
    offload = f"{MODEL}.enable_activation_offload=true"
    stays, away = (plan(tmp_path, "cluster.actor_world_size=2", *more)["actor"] for more in ((), (offload,)))
    assert stays.parts["activations"] * GIB == pytest.approx(2 * INPUTS + 2 * INPUTS)
    assert away.parts["activations"] * GIB == pytest.approx(INPUTS + 2 * INPUTS)
    assert INPUTS == 576
    assert away.host["activations"] * GIB == pytest.approx(2 * 1024)
    assert "activations" not in stays.host
    on_cpu = [plan(tmp_path, "cluster=cpu", *more)["actor"] for more in ((), (offload,))]
    assert on_cpu[0] == on_cpu[1]
    critics = ("recipe=ppo", f"critic.model.path={tmp_path}", "cluster.critic_world_size=2")
    stays, away = (plan(tmp_path, *critics, *more)["critic"] for more in ((), (offload,)))
    assert stays.total - away.total == pytest.approx(INPUTS / GIB)
    assert away.host["activations"] * GIB == pytest.approx(2 * 1024)
    assert "activations" not in plan(tmp_path, offload, "trainer.val_only=true")["actor"].host


def test_a_pass_of_an_engine_that_cuts_no_prompts_holds_the_longest_sequence(tmp_path: Path) -> None:
    budget = (f"{ROLLOUT}.max_num_batched_tokens=8", f"{ROLLOUT}.max_num_seqs=8", "data.max_response_length=60")
    cut, whole = (
        plan(tmp_path, *budget, f"{ROLLOUT}.enable_chunked_prefill={value}")["rollout"].parts["pass"] * GIB
        for value in ("true", "false")
    )
    per_token = (4 * 8 + 3 * 16) * 2
    assert whole - cut == pytest.approx((64 - 8) * per_token)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_wait_are_whole(tmp_path: Path, ranks: int) -> None:
    """Reduced, a rank keeps its shard of 4 bytes a parameter; deferred all of it, as does a rank that is alone."""
    size = f"cluster.actor_world_size={ranks}"
    reduced, deferred = (
        plan(tmp_path, size, f"{FSDP}.defer_grad_sync={value}")["actor"].parts["gradients"] * GIB
        for value in ("false", "true")
    )
    assert reduced == pytest.approx(PARAMETERS * 4 / ranks)
    assert deferred == pytest.approx(PARAMETERS * 4)


def test_offloaded_states_are_there_for_the_step_alone(tmp_path: Path) -> None:
    kept = plan(tmp_path, "cluster=single_gpu", f"{FSDP}.optimizer_offload=false")["actor"]
    away = plan(tmp_path, "cluster=single_gpu")["actor"]
    states = PARAMETERS * 8 / GIB
    assert kept.total - away.total == pytest.approx(states), "they are not there in the backward pass"
    assert "optimizer" not in away.parts
    assert away.between * GIB == pytest.approx(PARAMETERS * 4), "weights alone stay"
    assert kept.between * GIB == pytest.approx(PARAMETERS * 12), "what is free is given back where roles share a GPU"
    alone = plan(tmp_path, "cluster=node8", "cluster.colocate=separate")
    assert all(role.between == role.total for name, role in alone.items() if name != "rollout"), "elsewhere it is kept"
    assert away.host["offloaded"] == pytest.approx(states)
    assert away.host["a copy for a checkpoint"] * GIB == pytest.approx(PARAMETERS * 12)


def test_the_reference_waits_in_cpu_memory(tmp_path: Path) -> None:
    ref = plan(tmp_path, "cluster=single_gpu")["ref"]
    assert ref.between == 0
    assert ref.host["offloaded"] * GIB == pytest.approx(PARAMETERS * 2)
    assert ref.host["weights being loaded"] * GIB == pytest.approx(PARAMETERS * 2 + MATRIX * 2)
    stays = plan(tmp_path, "cluster=single_gpu", "actor_rollout_ref.ref.fsdp_config.param_offload=false")["ref"]
    assert stays.between * GIB == pytest.approx(PARAMETERS * 2)
    assert "offloaded" not in stays.host


def test_the_reward_model_has_no_output_layer_and_its_own_sizes(tmp_path: Path) -> None:
    """Four ranks in bf16 hold a quarter each; a pass gathers the embedding and two layers, and makes no logits."""
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 4}))
    enabled = (
        "reward_model.enable=true",
        f"reward_model.model.path={scorer}",
        "reward_model.micro_batch_size_per_gpu=8",
    )
    found = plan(tmp_path, *enabled)["reward_model"]
    weights = (4 * LAYER + MATRIX + 8) * 2
    layer = TOKENS * (3 * 16 + 4 * 8) * 2
    assert numbers(found) == {
        "weights": weights / 4,
        "gathered weights": (MATRIX + 8 + 2 * LAYER) * 2,
        "activations": layer,
    }
    offloads = plan(tmp_path, *enabled, "reward_model.model.fsdp_config.param_offload=true")["reward_model"]
    assert offloads.between == 0
    assert offloads.host["offloaded"] == pytest.approx(weights / 4 / GIB)


def test_a_retrained_reward_model_has_gradients_and_states(tmp_path: Path) -> None:
    """Four ranks hold a quarter of the weights in fp32, their gradients and two moments; a checkpoint copies them."""
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 4}))
    iterative = ("recipe=deepseekmath_iterative", f"reward_model.model.path={scorer}")
    found = plan(tmp_path, *iterative)["reward_model"]
    weights = (4 * LAYER + MATRIX + 8) * 4 / 4
    parts = numbers(found)
    assert parts["weights"] == weights
    assert parts["gradients"] == weights
    assert parts["optimizer"] == 2 * weights
    assert found.host["a copy for a checkpoint"] * GIB == pytest.approx(3 * weights)
    never = plan(tmp_path, *iterative, "reward_model.retrain.freq=-1")["reward_model"]
    assert "optimizer" not in never.parts
    offloads = plan(tmp_path, *iterative, "reward_model.retrain.optimizer_offload=true")["reward_model"]
    assert offloads.host["offloaded"] * GIB == pytest.approx(2 * weights)


def test_a_reward_model_of_unknown_sizes_is_left_out(tmp_path: Path) -> None:
    assert "reward_model" not in plan(tmp_path, "reward_model.enable=true", "reward_model.model.path=some/model")


def test_a_teacher_has_its_own_sizes(tmp_path: Path) -> None:
    """Its weights on its ranks; on the actor's, a copy of its output layer instead of the policy's."""
    larger = SHAPE | {"hidden_size": 16, "num_hidden_layers": 4}
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(larger))
    exact = ("actor_rollout_ref.actor.kl_loss_type=full",)
    taught = plan(tmp_path, *exact, f"{TEACHER}={tmp_path / 'teacher'}")
    plain = plan(tmp_path, *exact)
    layer = "reference's output layer"
    assert taught["actor"].parts[layer] == pytest.approx(2 * plain["actor"].parts[layer])
    assert taught["ref"].parts["weights"] > 2 * plain["ref"].parts["weights"]
    assert taught["rollout"] == plain["rollout"]


def test_a_teacher_of_unknown_sizes_is_left_out(tmp_path: Path) -> None:
    assert "ref" not in plan(tmp_path, f"{TEACHER}=some/model")


def test_a_critic_has_all_that_trains_but_no_output_layer(tmp_path: Path) -> None:
    """Of the actor's size it has the actor's memory, less what the output layer takes."""
    found = plan(tmp_path, "cluster=node8", "recipe=ppo")
    critic, actor = found["critic"], found["actor"]
    for part in ("weights", "gradients", "optimizer"):
        assert 0.5 < critic.parts[part] / actor.parts[part] <= 1
    assert "logits" not in critic.parts or critic.parts["logits"] == 0
    assert 0 < critic.between < critic.total
    assert critic.host["a copy for a checkpoint"] > 0
    away = plan(tmp_path, "cluster=single_gpu", "recipe=ppo")["critic"]
    assert away.between == 0, "weights and states are in CPU memory"
    assert away.host["offloaded"] * GIB == pytest.approx(12 * critic.parts["weights"] * GIB, rel=0.01)
    only = plan(tmp_path, "recipe=ppo", "trainer.val_only=true")["critic"]
    assert set(only.parts) == {"weights"}


def test_a_critic_of_unknown_sizes_is_left_out(tmp_path: Path) -> None:
    assert "critic" not in plan(tmp_path, "recipe=ppo", "critic.model.path=some/model")


def test_an_engine_that_sleeps_has_its_weights_in_cpu_memory(tmp_path: Path) -> None:
    asleep = "actor_rollout_ref.rollout.free_cache_engine=true"
    kept, away = (plan(tmp_path, "cluster=single_gpu", *more)["rollout"] for more in ((), (asleep,)))
    assert away.host_total - kept.host_total == pytest.approx(PARAMETERS * 2 / GIB)
    assert plan(tmp_path, asleep)["rollout"].host == plan(tmp_path)["rollout"].host, "its GPU is its own"


def test_qwen3_8b_fits_eight_gpus_with_room() -> None:
    """Two thirds of 80 GB, with responses of 1,024 tokens."""
    config, _ = load_config(["model=qwen3_8b", "cluster=node8", "data.max_response_length=1024",
                             "data.train_batch_size=64", "cluster.gpu_memory_gib=79"])  # fmt: skip
    actor = (memory_estimate(config, MODELS["Qwen3-8B"]) or [])[0]
    assert actor.total < 79 * 2 / 3
