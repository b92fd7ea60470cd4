"""The memory estimate: by hand, and against torch's tracker, which follows the engine's own code over fake tensors."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.load import load_command
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.memory import PINNED, RoleMemory, kv_cache_tokens, memory_estimate
from grpo_dist.plan.model_shape import model_config_at_hand, model_shape
from grpo_dist.sizes import GIB
from tests.memory_cells import CELLS, MODELS, QUICK, measured, planned, run_config
from tests.plan.asked import load, overrides

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
SMALL = "data.max_prompt_length=4  data.max_response_length=4  cluster=node8  data.train_batch_size=32"
TWO = "actors=2"


def plan(tmp_path: Path, *runs: str) -> dict[str, RoleMemory]:
    return _plan(tmp_path, GRPO, *overrides(f"model.path={tmp_path}", SMALL, *runs))


def supervised(tmp_path: Path, command: Any, *settings: str) -> RoleMemory:
    small = ("trainer.n_gpus_per_node=2", "data.max_length=16", "data.micro_batch_size_per_gpu=2")
    return _plan(tmp_path, command, f"model.path={tmp_path}", *small, *settings)[command.schema.role]


def _plan(tmp_path: Path, command: Any, *settings: str) -> dict[str, RoleMemory]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config, _ = load_command(list(settings), command)
    return {role.role: role for role in memory_estimate(config, SHAPE) or []}


def another(tmp_path: Path, **changes: int) -> Path:
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "config.json").write_text(json.dumps(SHAPE | changes))
    return tmp_path / "another"


def bytes_of(parts: Any) -> dict[str, Any]:
    return {name: pytest.approx(gib * GIB) for name, gib in parts.items()}


def numbers(role: RoleMemory) -> dict[str, Any]:
    return bytes_of(role.parts)


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
    """Beside them two layers and the root in bf16, a layer's inputs, and logits and gradients in float32."""
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
    kept = plan(tmp_path, TWO, "model.enable_gradient_checkpointing=false")["actor"]
    assert numbers(kept)["activations"] == 2 * KEPT
    copies = plan(tmp_path, "actors=4", "fsdp_size=2")["actor"]
    assert dict(copies.parts) == pytest.approx(dict(two.parts)), "each of two copies is on two ranks"


@pytest.mark.deep
def test_an_output_layer_in_float32(tmp_path: Path) -> None:
    """2 bytes more of each of its weights, wherever it is held in bf16 or gathered; and hidden states in float32."""
    head = "model.head_dtype=fp32"
    for run, name, part, more in (
        (TWO, "actor", "gathered weights", 2 * MATRIX),
        (TWO, "actor", "layer or logits", 2 * TOKENS * 8 * 4),
        ("", "actor", "gathered weights", 2 * MATRIX),
        ("actors=2  model.lora_rank=2  model.target_modules=[q_proj]", "actor", "weights", 2 * MATRIX / 2),
        ("refs=1", "ref", "weights", 2 * MATRIX),
        ("", "rollout", "weights", 2 * MATRIX),
        ("TP=2", "rollout", "weights", 2 * MATRIX / 2),
        ("rollout.dtype=float32", "rollout", "weights", 0),
        ("actors=2  actor.fsdp_config.dtype=fp32", "actor", "gathered weights", 0),
    ):
        plain, apart = (plan(tmp_path, run, key)[name].parts[part] * GIB for key in ("", head))
        assert apart - plain == pytest.approx(more), (run, name, part)
    assert plan(tmp_path, head)["actor"].syncing > plan(tmp_path)["actor"].syncing


def test_ranks_that_split_sequences_have_their_share_of_the_activations(tmp_path: Path) -> None:
    """A half of the tokens each; where a budget fills a pass, it is twice as large and a rank has what it had."""
    for role in ("actor", "ref", "critic"):
        whole, half = (plan(tmp_path, "recipe=ppo", TWO, more)[role] for more in ("", "ulysses=2"))
        assert half.parts["activations"] == pytest.approx(whole.parts["activations"] / 2), role
        assert half.states == whole.states
    budget = "actors=2  actor.use_dynamic_bsz=true  actor.ppo_max_token_len_per_gpu=4096"
    assert plan(tmp_path, budget)["actor"] == plan(tmp_path, budget, "ulysses=2")["actor"]


def test_offloaded_activations_are_in_cpu_memory(tmp_path: Path) -> None:
    """Of two layers the inputs of one are on the GPU; each waits in a pinned block, whose size is a power of two."""
    offload = "model.enable_activation_offload=true"
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
    budget = "rollout.max_num_batched_tokens=8  rollout.max_num_seqs=8  data.max_response_length=60"
    cuts = [f"rollout.enable_chunked_prefill={value}" for value in ("true", "false")]
    cut, whole = (plan(tmp_path, budget, each)["rollout"].parts["pass"] * GIB for each in cuts)
    assert whole - cut == pytest.approx((64 - 8) * (4 * 8 + 3 * 16) * 2)
    for more, weights, engines in (("TP=1", 2, 4), ("TP=2", 1, 2)):  # in a file, and on the machine in its share
        stored = plan(tmp_path, "rollout.checkpoint_engine.backend=object_store", more)["rollout"].host
        assert stored["weights on their way"] * GIB == pytest.approx(PARAMETERS * weights * (1 + 1 / engines))
    # 2 (key, value) * 36 layers * 8 heads * 128 values * 2 bytes = 144 KiB per token, on two GPUs
    for gib, tokens in (("9", 2 * 9 * 2**30 // (144 * 2**10)), ("null", None)):
        config = load("cluster=node8  TP=2", f"rollout.kv_cache_memory_gib={gib}")
        assert kv_cache_tokens(config, MODELS["Qwen3-8B"]) == tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_wait_are_whole(tmp_path: Path, ranks: int) -> None:
    """Reduced, a rank keeps its shard of 4 bytes a parameter; deferred all of it, as does a rank that is alone."""
    for deferred, share in (("false", ranks), ("true", 1)):
        actor = plan(tmp_path, f"actors={ranks}  actor.fsdp_config.defer_grad_sync={deferred}")["actor"]
        assert numbers(actor)["gradients"] == PARAMETERS * 4 / share


def test_offloaded_states_are_there_for_the_step_alone(tmp_path: Path) -> None:
    offloads = [f"cluster=single_gpu  actor.fsdp_config.optimizer_offload={value}" for value in ("false", "true")]
    kept, away = (plan(tmp_path, run)["actor"] for run in offloads)
    saved = sum(kept.parts.values()) - sum(away.parts.values())
    assert saved * GIB == pytest.approx(PARAMETERS * 8), "they are not there in the backward pass"
    assert away.states == kept.states, "and there in the step"
    assert away.waiting * GIB == pytest.approx(PARAMETERS * 4), "weights alone stay"
    assert kept.waiting * GIB == pytest.approx(PARAMETERS * 12)
    assert away.host["offloaded"] * GIB == pytest.approx(PARAMETERS * 8)
    assert away.host["a copy for a checkpoint"] * GIB == pytest.approx(PARAMETERS * 12)


def test_8_bit_states_are_a_byte_and_a_scale_for_256(tmp_path: Path) -> None:
    """In a checkpoint they are float32, as beside weights of any type."""
    eight_bit, bf16 = "actor.optim.optimizer=AdamW8bit", "actor.fsdp_config.model_dtype=bf16"
    byte = 1 + 1 / 64
    half = PARAMETERS / 2
    for run, held, state in (("", 4, 4), (eight_bit, 4, byte), (bf16, 2, 4), (f"{eight_bit}  {bf16}", 2, byte)):
        actor = plan(tmp_path, TWO, run)["actor"]
        of_all = {"weights": held * half, "gradients": held * half, "optimizer": 2 * state * half}
        assert bytes_of(actor.states) == of_all, run
        assert actor.saved * GIB == pytest.approx((held + 8) * PARAMETERS)
        assert actor.host["a copy for a checkpoint"] * GIB == pytest.approx((held + 8) * half)
    critic = plan(tmp_path, "recipe=ppo", TWO, "critic.optim.optimizer=AdamW8bit")["critic"]
    assert bytes_of(critic.states)["optimizer"] == 2 * byte * (PARAMETERS - MATRIX) / 2
    tuned = supervised(tmp_path, SFT, "optim.optimizer=AdamW8bit")
    assert bytes_of(tuned.states)["optimizer"] == 2 * byte * PARAMETERS / 2


def test_the_reference_waits_in_cpu_memory(tmp_path: Path) -> None:
    shared = "cluster=single_gpu"
    away, stays = plan(tmp_path, shared)["ref"], plan(tmp_path, shared, "ref.fsdp_config.param_offload=false")["ref"]
    assert (away.waiting, away.host["offloaded"] * GIB) == (0, pytest.approx(PARAMETERS * 2))
    assert stays.waiting * GIB == pytest.approx(PARAMETERS * 2)
    assert "offloaded" not in stays.host
    assert "gathered weights" not in stays.parts, "it is alone and frozen: FSDP, which would copy them, is left out"
    bf16 = "refs=2  ref.fsdp_config.dtype=bf16  ref.ref_model_sync_steps=2"
    for share, held in ((0.1, 4), (1.0, 2)):  # one that moves by shares is held in fp32
        moved = plan(tmp_path, bf16, f"ref.ref_model_mixup_alpha={share}")["ref"]
        assert numbers(moved)["weights"] == PARAMETERS * held / 2


def test_a_reward_model_has_no_output_layer_and_its_own_sizes(tmp_path: Path) -> None:
    """Four ranks hold a quarter each: in bf16 if it is frozen, in fp32 with gradients and states if it is retrained."""
    path = f"reward_model.model.path={another(tmp_path, num_hidden_layers=4)}"
    count = 4 * LAYER + MATRIX + 8
    frozen = plan(tmp_path, "reward_model.enable=true", path, "reward_model.micro_batch_size_per_gpu=8")["reward_model"]
    gathered = (MATRIX + 8 + 2 * LAYER) * 2
    assert numbers(frozen) == {"weights": count * 2 / 4, "gathered weights": gathered, "activations": KEPT / 2}
    retrain = f"recipe=deepseekmath_iterative  {path}"
    retrained = plan(tmp_path, retrain)["reward_model"]
    assert bytes_of(retrained.states) == {"weights": count, "gradients": count, "optimizer": 2 * count}
    assert retrained.saved * GIB == pytest.approx(12 * count)
    away = plan(tmp_path, retrain, "reward_model.retrain.optimizer_offload=true")["reward_model"]
    assert away.host["offloaded"] * GIB == pytest.approx(2 * count)
    never = plan(tmp_path, retrain, "reward_model.retrain.freq=-1")["reward_model"]
    assert (set(never.states), never.saved) == ({"weights"}, 0)


def test_models_of_unknown_sizes_are_left_out(tmp_path: Path) -> None:
    assert "ref" not in plan(tmp_path, "ref.model.path=some/model")
    assert "critic" not in plan(tmp_path, "recipe=ppo", "critic.model.path=some/model")
    assert "reward_model" not in plan(tmp_path, "reward_model.enable=true", "reward_model.model.path=some/model")
    config, _ = load_command([], SFT)
    assert memory_estimate(config, None) is None
    assert memory_estimate(config, {"model_type": "unheard_of"}) is None


def test_a_teacher_has_its_own_sizes(tmp_path: Path) -> None:
    taught, own = plan(tmp_path, f"ref.model.path={another(tmp_path, hidden_size=16)}"), plan(tmp_path)
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
    lora = ("model.lora_rank=4", "model.target_modules=all-linear")
    actor, tuned = plan(tmp_path, TWO, *lora)["actor"], supervised(tmp_path, SFT, *lora)
    expected = {"weights": PARAMETERS / 2 + factors, "gradients": factors, "optimizer": 2 * factors}
    for role in (actor, tuned):
        assert {name: gib * GIB / 4 * 2 for name, gib in role.states.items()} == pytest.approx(expected)
    alone = plan(tmp_path, "cluster=single_gpu", *lora)["actor"]
    assert numbers(alone)["gathered weights"] == factors * 2, "the base is there once"


def test_an_engine_that_sleeps_has_its_weights_in_cpu_memory_if_no_others_come(tmp_path: Path) -> None:
    """In pinned blocks of a power of two; all weights are dropped if a sync brings all."""
    asleep = "rollout.free_cache_engine=true"
    kept, away = (plan(tmp_path, "cluster=single_gpu", *more)["rollout"] for more in ((), (asleep,)))
    assert away.host == kept.host
    factors = (asleep, "model.lora_rank=4", "model.target_modules=all-linear", "model.lora.merge=false")
    away = plan(tmp_path, "cluster=single_gpu", *factors)["rollout"]
    assert away.host["weights while it sleeps"] * GIB == pytest.approx(PARAMETERS * 2 * PINNED)
    assert plan(tmp_path, *factors)["rollout"].host == kept.host, "its GPU is its own"


def test_a_command_that_trains_one_model(tmp_path: Path) -> None:
    """The answers of a pair are in one pass; a reward model loads no output layer."""
    two, one = (supervised(tmp_path, REWARD_MODEL, f"trainer.n_gpus_per_node={ranks}") for ranks in (2, 1))
    count, tokens = PARAMETERS - MATRIX, 2 * 16
    assert bytes_of(two.states) == {"weights": count * 2, "gradients": count * 2, "optimizer": count * 4}
    assert one.states == {name: pytest.approx(2 * size) for name, size in two.states.items()}
    kept = KEPT / TOKENS
    assert numbers(two)["layer or logits"] == 1.5 * kept * tokens + LAYER * 4
    assert supervised(tmp_path, REWARD_MODEL, "data.micro_batch_size_per_gpu=1") == two
    budget = ("data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=64")
    assert numbers(supervised(tmp_path, REWARD_MODEL, *budget))["layer or logits"] == 1.5 * kept * 64 + LAYER * 4
    assert numbers(supervised(tmp_path, SFT))["layer or logits"] == MATRIX * 4 + LOGITS / TOKENS * tokens
    assert supervised(tmp_path, REWARD_MODEL, "engine.fsdp_size=1").states == one.states


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
    shape: Any = model_shape(config)
    assert shape.num_parameters == pytest.approx(billions * 1e9, rel=near)


def test_a_mixture_of_experts() -> None:
    """Qwen3-30B-A3B; transformers counts 30,532,122,624, 12,288 of them in norms of queries and keys."""
    shape: Any = model_shape(MODELS["Qwen3-30B-A3B"])
    attention = 2048 * (4096 + 512 + 512) + 4096 * 2048
    experts = 128 * 3 * 2048 * 768
    assert shape.layer == attention + experts + 128 * 2048 + 2 * 2048 == 623_120_384
    assert shape.num_parameters == 30_532_122_624 - 48 * 2 * 128
    assert (shape.width, shape.copies) == (8 * 768, 8 * 2048), "a token goes to 8 of 128"
    factors = 48 * 32 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
    model = load("model.lora_rank=32").actor_rollout_ref.model
    assert shape.lora_parameters(model) == factors == 26_738_688, "of the attention alone"


@pytest.mark.parametrize(
    ("entries", "experts"),
    [({"num_local_experts": 8}, 8), ({"n_routed_experts": 16}, 16), ({"num_experts": 1}, 0), ({}, 0)],
)
def test_experts_by_the_names_that_families_give_them(entries: dict[str, int], experts: int) -> None:
    shape: Any = model_shape(decoder(8, 1, 2, 16, 9, num_experts_per_tok=2) | entries)
    assert shape.layer == 4 * 8 * 8 + max(1, experts) * 3 * 8 * 16 + experts * 8 + 2 * 8
    assert shape.copies == (2 * 8 if experts else 0)
    assert ("gate_proj" in shape.linears) == (not experts)


def test_sizes_of_hub_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
