"""What a rehearsal makes smaller, and what stays."""

from typing import Any

import pytest

from grpo_dist.config.command import CONFIG_DIR
from grpo_dist.config.keys import value_of
from grpo_dist.plan.commands import GRPO, load_config
from grpo_dist.plan.shrink import shrunk_config, shrunk_model
from tests.tiers import first

RECIPES = sorted(path.stem for path in (CONFIG_DIR / "recipe").glob("*.yaml"))
GPUS = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8", "trainer.dry_run=config")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LARGE = (
    *GPUS, "data.train_batch_size=1024", f"{ACTOR}.ppo_mini_batch_size=256", "data.max_response_length=400",
    f"{ROLLOUT}.n=16", f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.free_cache_engine=true",
    "cluster.colocate=all", f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ACTOR}.ppo_max_token_len_per_gpu=65536",
    f"+{ROLLOUT}.engine_kwargs.vllm={{quantization: fp8, async_scheduling: false}}", "algorithm.min_group_size=8",
    "reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=300",
)  # fmt: skip
SMALL = {
    "trainer.n_gpus_per_node": 0, "trainer.nnodes": 1, "trainer.total_training_steps": 3,
    "trainer.default_local_dir": "/there/run", "cluster.actor_world_size": 2, "data.train_batch_size": 4,
    "data.max_response_length": 256, "algorithm.min_group_size": 4, "reward.overlong_buffer.len": 128,
    f"{ROLLOUT}.n": 4, f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.engine_kwargs": {"vllm": {"async_scheduling": False}}, f"{ACTOR}.ppo_mini_batch_size": 2,
    f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{ACTOR}.ppo_max_token_len_per_gpu": 64 + 256,
    f"{ACTOR}.fsdp_config.param_offload": False,
}  # fmt: skip


def test_a_large_run_becomes_small_and_has_two_of_what_it_had_several() -> None:
    config, _ = load_config([*LARGE, "data.max_prompt_length=64"])
    small, told = shrunk_config(config, "/there")
    assert {key: value_of(small, key) for key in SMALL} == SMALL
    assert GRPO.problems(small) == []
    assert "trainer.nnodes: 2 -> 1" in told
    assert not [line for line in told if line.startswith(("critic.", "reward_model."))], "the run has neither"
    again, nothing = shrunk_config(small, "/there")
    assert (again, nothing) == (small, [])


@pytest.mark.parametrize("recipe", first(RECIPES, "grpo", "ppo", "deepseekmath_iterative"))
def test_a_recipe_is_still_valid(recipe: str) -> None:
    """And keeps its method: of `algorithm` and of the actor's loss nothing changes."""
    config, _ = load_config([f"recipe={recipe}", "trainer.dry_run=config", *TEACHER.get(recipe, ())])
    small, told = shrunk_config(config, "/there")
    assert GRPO.problems(small) == []
    assert [line for line in told if line.startswith(("algorithm.", f"{ACTOR}.policy_loss", f"{ACTOR}.loss"))] == []


TEACHER = dict.fromkeys(("deepseekmath_iterative", "deepseekmath"), ("reward_model.model.path=builtin:tiny-qwen3",))
TEACHER["distill"] = ("actor_rollout_ref.ref.model.path=builtin:tiny-qwen3",)
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
QWEN3 = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


@pytest.mark.parametrize(
    ("config", "small"),
    [
        (
            QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "rope_theta": 1e6},
            QWEN3 | {"num_attention_heads": 8, "num_key_value_heads": 2}
            | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "rope_theta": 1e6},
        ),
        # 28 heads of 128 without a name for that size: two of them make 256
        (
            {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28},
            {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2},
        ),
        ({"n_embd": 768, "n_head": 12, "n_layer": 12}, {"n_embd": 256, "n_head": 4, "n_layer": 2}),
        # one period of a hybrid, and experts of which half are chosen at most
        (
            {"num_hidden_layers": 48, "layer_types": LAYERS * 12, "num_experts": 512, "num_experts_per_tok": 10},
            {"num_hidden_layers": 4, "layer_types": LAYERS, "num_experts": 8, "num_experts_per_tok": 4},
        ),
        # a dense layer and one of experts, in 8 groups of two
        (
            {"num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_group": 8},
            {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 8},
        ),
        ({"text_config": {"num_hidden_layers": 30}, "a": 1}, {"text_config": {"num_hidden_layers": 2}, "a": 1}),
    ],
)  # fmt: skip
def test_a_model_keeps_its_architecture(config: dict[str, Any], small: dict[str, Any]) -> None:
    assert shrunk_model(config) == small
    assert shrunk_model(small) == small
