"""The memory estimate: by hand, and against torch's tracker, which follows the engine's own code over fake tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.load import load_command
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.memory import PINNED, RoleMemory, kv_cache_tokens, memory_estimate, memory_problems
from grpo_dist.plan.model_shape import model_config_at_hand, model_shape
from grpo_dist.sizes import GIB
from tests.memory_cells import ACTOR, CELLS, FSDP, MODELS, QUICK, measured, planned, run_config

ROLLOUT = "actor_rollout_ref.rollout"
MODEL, TEACHER = "actor_rollout_ref.model", "actor_rollout_ref.ref.model.path"
# 2 layers of 4 * 8^2 + 3 * 8 * 16 + 2 * 8 = 656 numbers; an embedding and an output layer of 100 * 8, a norm of 8.
SHAPE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 16, "vocab_size": 100, "tie_word_embeddings": False}  # fmt: skip
LAYER, MATRIX = 656, 800
ROOT = 2 * MATRIX + 8
PARAMETERS = 2 * LAYER + ROOT
# A group of 8 responses of 4 tokens after a prompt of 4, which they share.
TOKENS = 36
INPUTS, KEPT = TOKENS * 8 * 2, TOKENS * 2 * (8 * 8 + 5 * (8 + 8) + 4 * 16)
LOGITS = 2 * TOKENS * 100 * 4
SMALL = ("data.max_prompt_length=4", "data.max_response_length=4", "cluster=node8", "data.train_batch_size=32")
TWO = "cluster.actor_world_size=2"


def plan(tmp_path: Path, *overrides: str) -> dict[str, RoleMemory]:
    return _plan(tmp_path, GRPO, f"{MODEL}.path={tmp_path}", *SMALL, *overrides)


def supervised(tmp_path: Path, command: Any, *overrides: str) -> RoleMemory:
    small = ("trainer.n_gpus_per_node=2", "data.max_length=16", "data.micro_batch_size_per_gpu=2")
    return _plan(tmp_path, command, f"model.path={tmp_path}", *small, *overrides)[command.schema.role]


def _plan(tmp_path: Path, command: Any, *overrides: str) -> dict[str, RoleMemory]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config, _ = load_command(list(overrides), command)
    return {role.role: role for role in memory_estimate(config, SHAPE) or []}


def numbers(role: RoleMemory) -> dict[str, Any]:
    return {name: pytest.approx(gib * GIB) for name, gib in role.parts.items()}


def states(role: RoleMemory) -> dict[str, Any]:
    return {name: pytest.approx(gib * GIB) for name, gib in role.states.items()}


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CELLS]
)
def test_the_plan_is_what_the_tracker_sees(name: str, tmp_path: Path) -> None:
    config = run_config(CELLS[name], tmp_path)
    plan, found = planned(CELLS[name], config), measured(CELLS[name], config)
    assert sum(plan.parts.values()) == pytest.approx(found["Total"], rel=0.15), (dict(plan.parts), found)


def test_two_ranks_halve_weights_gradients_and_states(tmp_path: Path) -> None:
    """Beside them: two layers and the root in bf16, a layer's inputs, and at the output layer, the largest, logits and
    gradients in float32.
    """
    two = plan(tmp_path, TWO)["actor"]
    assert numbers(two) == {
        "weights": PARAMETERS * 4 / 2,
        "gradients": PARAMETERS * 4 / 2,
        "optimizer": PARAMETERS * 8 / 2,
        "gathered weights": (ROOT + 2 * LAYER) * 2,
        "activations": 2 * INPUTS,
        "layer or logits": MATRIX * 4 + LOGITS,
    }
    assert two.host["a copy for a checkpoint"] * GIB == pytest.approx(PARAMETERS * 12 / 2)
    kept = plan(tmp_path, TWO, f"{MODEL}.enable_gradient_checkpointing=false")["actor"]
    assert numbers(kept)["activations"] == 2 * KEPT
    copies = plan(tmp_path, "cluster.actor_world_size=4", f"{FSDP}.fsdp_size=2")["actor"]
    assert dict(copies.parts) == pytest.approx(dict(two.parts)), "each of two copies is on two ranks"


def test_an_output_layer_in_float32(tmp_path: Path) -> None:
    """2 bytes more of each of its weights, wherever it is held in bf16 or gathered; and hidden states in float32."""
    head = f"{MODEL}.head_dtype=fp32"
    for overrides, name, part, more in (
        ((TWO,), "actor", "gathered weights", 2 * MATRIX),
        ((TWO,), "actor", "layer or logits", 2 * TOKENS * 8 * 4),
        ((), "actor", "gathered weights", 2 * MATRIX),
        ((TWO, f"{MODEL}.lora_rank=2", f"{MODEL}.target_modules=[q_proj]"), "actor", "weights", 2 * MATRIX / 2),
        (("cluster.ref_world_size=1",), "ref", "weights", 2 * MATRIX),
        ((), "rollout", "weights", 2 * MATRIX),
        ((f"{ROLLOUT}.tensor_model_parallel_size=2",), "rollout", "weights", 2 * MATRIX / 2),
        ((f"{ROLLOUT}.dtype=float32",), "rollout", "weights", 0),
        ((f"{FSDP}.dtype=fp32", TWO), "actor", "gathered weights", 0),
    ):
        plain, apart = (plan(tmp_path, *overrides, *keys)[name].parts[part] * GIB for keys in ((), (head,)))
        assert apart - plain == pytest.approx(more), (overrides, name, part)
    assert plan(tmp_path, head)["actor"].syncing > plan(tmp_path)["actor"].syncing


def test_ranks_that_split_sequences_have_their_share_of_the_activations(tmp_path: Path) -> None:
    """A half of the tokens each; where a budget fills a pass, it is twice as large and a rank has what it had."""
    actor = "actor_rollout_ref.actor"
    split = f"{actor}.ulysses_sequence_parallel_size=2"
    for role in ("actor", "ref", "critic"):
        whole, half = (plan(tmp_path, "recipe=ppo", TWO, *more)[role] for more in ((), (split,)))
        assert half.parts["activations"] == pytest.approx(whole.parts["activations"] / 2), role
        assert half.states == whole.states
    budget = (f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_max_token_len_per_gpu=4096")
    assert plan(tmp_path, TWO, *budget)["actor"] == plan(tmp_path, TWO, *budget, split)["actor"]


def test_offloaded_activations_are_in_cpu_memory(tmp_path: Path) -> None:
    """Of two layers the inputs of one are on the GPU; each waits in a pinned block, whose size is a power of two."""
    offload = f"{MODEL}.enable_activation_offload=true"
    away = plan(tmp_path, TWO, offload)["actor"]
    assert numbers(away)["activations"] == INPUTS == 576
    assert away.host["activations"] * GIB == pytest.approx(2 * 1024)
    assert "activations" not in plan(tmp_path, TWO)["actor"].host
    assert plan(tmp_path, "cluster=cpu", offload) == plan(tmp_path, "cluster=cpu")
    critic = plan(tmp_path, "recipe=ppo", f"critic.model.path={tmp_path}", offload)["critic"]
    assert critic.host["activations"] * GIB == pytest.approx(2 * 1024), "as the actor, unless it is set"


def test_an_engine(tmp_path: Path) -> None:
    """Without a size of the cache a sequence is counted; a pass that cuts no prompts holds the longest one."""
    engine = numbers(plan(tmp_path)["rollout"])
    assert (engine["weights"], engine["KV cache of one sequence"]) == (PARAMETERS * 2, 8 * 2 * 2 * 8 * 2)
    budget = (f"{ROLLOUT}.max_num_batched_tokens=8", f"{ROLLOUT}.max_num_seqs=8", "data.max_response_length=60")
    cut, whole = (
        plan(tmp_path, *budget, f"{ROLLOUT}.enable_chunked_prefill={value}")["rollout"].parts["pass"] * GIB
        for value in ("true", "false")
    )
    assert whole - cut == pytest.approx((64 - 8) * (4 * 8 + 3 * 16) * 2)
    config, _ = load_command(["cluster=node8", f"{ROLLOUT}.kv_cache_memory_gib=9",
                              f"{ROLLOUT}.tensor_model_parallel_size=2"], GRPO)  # fmt: skip
    # 2 (key, value) * 36 layers * 8 heads * 128 values * 2 bytes = 144 KiB per token, on two GPUs
    assert kv_cache_tokens(config, MODELS["Qwen3-8B"]) == 2 * 9 * 2**30 // (144 * 2**10)
    unsized, _ = load_command(["cluster=node8", f"{ROLLOUT}.kv_cache_memory_gib=null"], GRPO)
    assert kv_cache_tokens(unsized, MODELS["Qwen3-8B"]) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_wait_are_whole(tmp_path: Path, ranks: int) -> None:
    """Reduced, a rank keeps its shard of 4 bytes a parameter; deferred all of it, as does a rank that is alone."""
    size = f"cluster.actor_world_size={ranks}"
    reduced, deferred = (
        numbers(plan(tmp_path, size, f"{FSDP}.defer_grad_sync={value}")["actor"])["gradients"]
        for value in ("false", "true")
    )
    assert reduced == PARAMETERS * 4 / ranks
    assert deferred == PARAMETERS * 4


def test_offloaded_states_are_there_for_the_step_alone(tmp_path: Path) -> None:
    kept = plan(tmp_path, "cluster=single_gpu", f"{FSDP}.optimizer_offload=false")["actor"]
    away = plan(tmp_path, "cluster=single_gpu")["actor"]
    saved = sum(kept.parts.values()) - sum(away.parts.values())
    assert saved * GIB == pytest.approx(PARAMETERS * 8), "they are not there in the backward pass"
    assert away.states == kept.states, "and there in the step"
    assert away.waiting * GIB == pytest.approx(PARAMETERS * 4), "weights alone stay"
    assert kept.waiting * GIB == pytest.approx(PARAMETERS * 12)
    assert away.host["offloaded"] * GIB == pytest.approx(PARAMETERS * 8)
    assert away.host["a copy for a checkpoint"] * GIB == pytest.approx(PARAMETERS * 12)


OPTIM = "actor_rollout_ref.actor.optim"


def test_8_bit_states_are_a_byte_and_a_scale_for_256(tmp_path: Path) -> None:
    """In a checkpoint they are float32, as beside weights of any type."""
    eight_bit, bf16 = f"{OPTIM}.optimizer=AdamW8bit", f"{FSDP}.model_dtype=bf16"
    for overrides, held, state in (
        ((), 4, 4),
        ((eight_bit,), 4, 1 + 1 / 64),
        ((bf16,), 2, 4),
        ((eight_bit, bf16), 2, 1 + 1 / 64),
    ):
        actor = plan(tmp_path, TWO, *overrides)["actor"]
        half = PARAMETERS / 2
        of_all = {"weights": held * half, "gradients": held * half, "optimizer": 2 * state * half}
        assert states(actor) == of_all, overrides
        assert actor.saved * GIB == pytest.approx((held + 8) * PARAMETERS)
        assert actor.host["a copy for a checkpoint"] * GIB == pytest.approx((held + 8) * half)
    critics = [plan(tmp_path, "recipe=ppo", TWO, f"critic.optim.optimizer={name}")["critic"]
               for name in ("AdamW", "AdamW8bit")]  # fmt: skip
    assert critics[0].states["optimizer"] == pytest.approx(critics[1].states["optimizer"] * 4 / (1 + 1 / 64))
    tuned = supervised(tmp_path, SFT, "optim.optimizer=AdamW8bit")
    assert states(tuned)["optimizer"] == 2 * (1 + 1 / 64) * PARAMETERS / 2


def test_qwen3_1_7b_and_its_engine_fit_24_gb_in_turns() -> None:
    """All weights train: bf16 ones with 8-bit states. float32 weights with float32 states do not fit."""
    turns = ("cluster=single_gpu", f"{FSDP}.param_offload=true", f"{ROLLOUT}.free_cache_engine=true",
             f"{ROLLOUT}.checkpoint_engine.backend=object_store", f"{ROLLOUT}.gpu_memory_utilization=0.6",
             f"{MODEL}.enable_activation_offload=true", "data.max_prompt_length=512", "data.max_response_length=1024",
             f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=8192")  # fmt: skip
    fits = {}
    for dtype, optimizer in (("fp32", "AdamW"), ("bf16", "AdamW"), ("fp32", "AdamW8bit"), ("bf16", "AdamW8bit")):
        changes = (f"{FSDP}.model_dtype={dtype}", f"{OPTIM}.optimizer={optimizer}")
        config, _ = load_command(["model=qwen3_1_7b", *turns, *changes], GRPO)
        fits[dtype, optimizer] = not [*memory_problems(config, MODELS["Qwen3-1.7B"], 23.6, None, certain=False)]
    assert [kind for kind, fit in fits.items() if fit] == [("bf16", "AdamW8bit")]


def test_the_reference_waits_in_cpu_memory(tmp_path: Path) -> None:
    keeps = "actor_rollout_ref.ref.fsdp_config.param_offload=false"
    away, stays = (plan(tmp_path, "cluster=single_gpu", *more)["ref"] for more in ((), (keeps,)))
    assert (away.waiting, away.host["offloaded"] * GIB) == (0, pytest.approx(PARAMETERS * 2))
    assert stays.waiting * GIB == pytest.approx(PARAMETERS * 2)
    assert "offloaded" not in stays.host
    assert "gathered weights" not in stays.parts, "it is alone and frozen: FSDP, which would copy them, is left out"
    ref = "actor_rollout_ref.ref"
    for share, held in ((0.1, 4), (1.0, 2)):  # one that moves by shares is held in fp32
        moves = (f"{ref}.ref_model_sync_steps=2", f"{ref}.ref_model_mixup_alpha={share}")
        moved = plan(tmp_path, f"{ref}.fsdp_config.dtype=bf16", *moves, "cluster.ref_world_size=2")["ref"]
        assert numbers(moved)["weights"] == PARAMETERS * held / 2


def test_a_reward_model_has_no_output_layer_and_its_own_sizes(tmp_path: Path) -> None:
    """Four ranks hold a quarter each: in bf16 if it is frozen, in fp32 with gradients and states if it is retrained."""
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 4}))
    path, count = f"reward_model.model.path={scorer}", 4 * LAYER + MATRIX + 8
    frozen = plan(tmp_path, "reward_model.enable=true", path, "reward_model.micro_batch_size_per_gpu=8")["reward_model"]
    assert numbers(frozen) == {
        "weights": count * 2 / 4,
        "gathered weights": (MATRIX + 8 + 2 * LAYER) * 2,
        "activations": KEPT / 2,
    }
    retrained = plan(tmp_path, "recipe=deepseekmath_iterative", path)["reward_model"]
    assert states(retrained) == {"weights": count, "gradients": count, "optimizer": 2 * count}
    assert retrained.saved * GIB == pytest.approx(12 * count)
    offload = "reward_model.retrain.optimizer_offload=true"
    away = plan(tmp_path, "recipe=deepseekmath_iterative", path, offload)["reward_model"]
    assert away.host["offloaded"] * GIB == pytest.approx(2 * count)
    never = plan(tmp_path, "recipe=deepseekmath_iterative", path, "reward_model.retrain.freq=-1")["reward_model"]
    assert (set(never.states), never.saved) == ({"weights"}, 0)


def test_models_of_unknown_sizes_are_left_out(tmp_path: Path) -> None:
    assert "ref" not in plan(tmp_path, f"{TEACHER}=some/model")
    assert "critic" not in plan(tmp_path, "recipe=ppo", "critic.model.path=some/model")
    assert "reward_model" not in plan(tmp_path, "reward_model.enable=true", "reward_model.model.path=some/model")
    config, _ = load_command([], SFT)
    assert memory_estimate(config, None) is None
    assert memory_estimate(config, {"model_type": "unheard_of"}) is None


def test_a_teacher_has_its_own_sizes(tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(SHAPE | {"hidden_size": 16}))
    taught, own = plan(tmp_path, f"{TEACHER}={tmp_path / 'teacher'}"), plan(tmp_path)
    assert taught["ref"].parts["weights"] > 1.9 * own["ref"].parts["weights"]
    assert taught["rollout"] == own["rollout"]


def test_a_critic_has_all_that_trains_but_no_output_layer(tmp_path: Path) -> None:
    found = plan(tmp_path, "recipe=ppo")
    for part, size in found["critic"].states.items():
        assert size / found["actor"].states[part] == pytest.approx((PARAMETERS - MATRIX) / PARAMETERS), part
    away = plan(tmp_path, "cluster=single_gpu", "recipe=ppo")["critic"]
    assert away.waiting == 0, "weights and states are in CPU memory"
    only = plan(tmp_path, "recipe=ppo", "trainer.val_only=true")["critic"]
    assert (set(only.states), only.saved) == ({"weights"}, 0)


def test_lora_trains_and_saves_its_factors(tmp_path: Path) -> None:
    """Of rank 4: four matrices of 8 * 8 in a layer, and three of 8 * 16. Their base is frozen, in bf16."""
    factors = 2 * 4 * (4 * (8 + 8) + 3 * (8 + 16))
    lora = ("lora_rank=4", "target_modules=all-linear")
    actor = plan(tmp_path, TWO, *(f"{MODEL}.{each}" for each in lora))["actor"]
    tuned = supervised(tmp_path, SFT, *(f"model.{each}" for each in lora))
    expected = {"weights": PARAMETERS / 2 + factors, "gradients": factors, "optimizer": 2 * factors}
    for role in (actor, tuned):
        assert {name: gib * GIB / 4 * 2 for name, gib in role.states.items()} == pytest.approx(expected)
    alone = plan(tmp_path, "cluster=single_gpu", *(f"{MODEL}.{each}" for each in lora))["actor"]
    assert numbers(alone)["gathered weights"] == factors * 2, "the base is there once"


def test_an_engine_that_sleeps_has_its_weights_in_cpu_memory_if_no_others_come(tmp_path: Path) -> None:
    """In pinned blocks of a power of two; all weights are dropped if a sync brings all."""
    asleep = f"{ROLLOUT}.free_cache_engine=true"
    kept, away = (plan(tmp_path, "cluster=single_gpu", *more)["rollout"] for more in ((), (asleep,)))
    assert away.host == kept.host
    factors = (asleep, f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=all-linear", f"{MODEL}.lora.merge=false")
    away = plan(tmp_path, "cluster=single_gpu", *factors)["rollout"]
    assert away.host["weights while it sleeps"] * GIB == pytest.approx(PARAMETERS * 2 * PINNED)
    assert plan(tmp_path, *factors)["rollout"].host == kept.host, "its GPU is its own"


def test_a_command_that_trains_one_model(tmp_path: Path) -> None:
    """The answers of a pair are in one pass; a reward model loads no output layer."""
    two, one = (supervised(tmp_path, REWARD_MODEL, f"trainer.n_gpus_per_node={ranks}") for ranks in (2, 1))
    count, tokens = PARAMETERS - MATRIX, 2 * 16
    assert states(two) == {"weights": count * 2, "gradients": count * 2, "optimizer": count * 4}
    assert one.states == {name: pytest.approx(2 * size) for name, size in two.states.items()}
    kept = KEPT / TOKENS
    assert numbers(two)["layer or logits"] == 1.5 * kept * tokens + LAYER * 4
    single = supervised(tmp_path, REWARD_MODEL, "data.micro_batch_size_per_gpu=1")
    assert single == two
    budget = ("data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=64")
    assert numbers(supervised(tmp_path, REWARD_MODEL, *budget))["layer or logits"] == 1.5 * kept * 64 + LAYER * 4
    assert numbers(supervised(tmp_path, SFT))["layer or logits"] == MATRIX * 4 + LOGITS / TOKENS * tokens
    copies = supervised(tmp_path, REWARD_MODEL, "engine.fsdp_size=1")
    assert copies.states == one.states


# --- sizes of models, of which some are known
def decoder(hidden: int, layers: int, heads: int, width: int, vocabulary: int, **more: object) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, **more,
            "intermediate_size": width, "vocab_size": vocabulary}  # fmt: skip


SMOLLM2_135M = decoder(576, 30, 9, 1536, 49152, num_key_value_heads=3, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("config", "billions", "near"),
    [  # transformers counts 8,190,735,360 and 134,515,008; Qwen3's q and k norms are left out here
        (MODELS["Qwen3-8B"], 8.1907, 1e-4),
        (SMOLLM2_135M, 0.134515, 1e-4),
        # two matrices in a feed-forward layer: Pythia-1b and phi-2
        (decoder(2048, 16, 8, 8192, 50304, model_type="gpt_neox", tie_word_embeddings=False), 1.01, 0.01),
        (decoder(2560, 32, 32, 10240, 51200, model_type="phi", tie_word_embeddings=False), 2.78, 0.01),
        # an embedding that is the head too, though the file says nothing of it: Gemma-2b
        (decoder(2048, 18, 8, 16384, 256000, model_type="gemma", num_key_value_heads=1, head_dim=256), 2.51, 0.01),
    ],
)
def test_parameters_of_known_models(config: dict[str, Any], billions: float, near: float) -> None:
    shape = model_shape(config)
    assert shape is not None
    assert shape.num_parameters == pytest.approx(billions * 1e9, rel=near)


def test_a_mixture_of_experts() -> None:
    """Qwen3-30B-A3B; transformers counts 30,532,122,624, 12,288 of them in norms of queries and keys."""
    shape = model_shape(MODELS["Qwen3-30B-A3B"])
    assert shape is not None
    attention = 2048 * (4096 + 512 + 512) + 4096 * 2048
    experts = 128 * 3 * 2048 * 768
    assert shape.layer == attention + experts + 128 * 2048 + 2 * 2048 == 623_120_384
    assert shape.num_parameters == 30_532_122_624 - 48 * 2 * 128
    assert (shape.width, shape.copies) == (8 * 768, 8 * 2048), "a token goes to 8 of 128"
    factors = 48 * 32 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
    model = load_command([f"{MODEL}.lora_rank=32"], GRPO)[0].actor_rollout_ref.model  # type: ignore[attr-defined]
    assert shape.lora_parameters(model) == factors == 26_738_688, "of the attention alone"


@pytest.mark.parametrize(
    ("entries", "experts"),
    [({"num_local_experts": 8}, 8), ({"n_routed_experts": 16}, 16), ({"num_experts": 1}, 0), ({}, 0)],
)
def test_experts_by_the_names_that_families_give_them(entries: dict[str, int], experts: int) -> None:
    shape = model_shape(decoder(8, 1, 2, 16, 9, num_experts_per_tok=2) | entries)
    assert shape is not None
    assert shape.layer == 4 * 8 * 8 + max(1, experts) * 3 * 8 * 16 + experts * 8 + 2 * 8
    assert shape.copies == (2 * 8 if experts else 0)
    assert ("gate_proj" in shape.linears) == (not experts)


def test_sizes_of_hub_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's cache if it is there, else from known_models.json; nothing is downloaded."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert model_config_at_hand("Qwen/Qwen3-8B") == MODELS["Qwen3-8B"]
    assert model_config_at_hand("/models/Qwen3-8B") == MODELS["Qwen3-8B"]
    assert model_config_at_hand("someone/something") is None
    snapshot = tmp_path / "hub/models--someone--something/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SMOLLM2_135M))
    assert model_config_at_hand("someone/something") == SMOLLM2_135M
    assert model_shape({"n_embd": 768, "n_layer": 12}) is None, "of another architecture"
