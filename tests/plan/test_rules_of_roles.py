"""Rules on models beside the policy: a reference of another model, and a reward model that is retrained."""

from __future__ import annotations

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from tests.config.refusals import refused
from tests.messages import refuses, says

ACTOR, TEACHER = "actor_rollout_ref.actor", "actor_rollout_ref.ref.model.path"
SYNC = "actor_rollout_ref.ref.ref_model_sync_steps=2"
BUILTIN = f"{TEACHER}=builtin:tiny-qwen3"
SEVERAL = f"{TEACHER}={{a: builtin:tiny-qwen3, b/c: builtin:tiny-qwen3}}"
LORA = "actor_rollout_ref.model.lora_rank=2"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["recipe=distill"], [f"{TEACHER}=null", "algorithm.adv_estimator=distill"]),
        (["recipe=cispo", BUILTIN], [BUILTIN, f"{ACTOR}.use_kl_loss=false", "algorithm.use_kl_in_reward=false"]),
        ([BUILTIN, SYNC], [SYNC, BUILTIN, "-1"]),
        ([SEVERAL, f"{ACTOR}.kl_loss_type=full"], ["builtin:tiny-qwen3", f"{ACTOR}.kl_loss_type=full", "k2"]),
        ([SEVERAL.replace("builtin:tiny-qwen3}", "./nowhere}")], ["./nowhere", "folder"]),
        ([f"{TEACHER}=./nowhere"], [f"{TEACHER}=./nowhere", "folder"]),
        (
            [BUILTIN, "+actor_rollout_ref.ref.model.override_config.max_position_embeddings=100"],
            [BUILTIN, "100 positions", "actor_rollout_ref.ref.model.override_config"],
        ),
    ],
)
def test_what_is_refused(overrides: list[str], parts: list[str]) -> None:
    says(refused(*overrides), *parts)


ITERATIVE = ("recipe=deepseekmath_iterative", "reward_model.model.path=builtin:tiny-qwen3")
FREQ = "reward_model.retrain.freq=5"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["custom_reward_function.path=null"],
            [FREQ, "custom_reward_function.path=null", "grpo_dist.rewards.weighted"],
        ),
        (["trainer.max_staleness=1", SYNC.replace("=2", "=-1")], ["trainer.max_staleness=1", FREQ]),
        (["reward_model.process.enable=true"], [FREQ, "algorithm.adv_estimator=grpo", "grpo_process"]),
        (
            ["algorithm.adv_estimator=grpo_process"],
            [FREQ, "algorithm.adv_estimator=grpo_process", "reward_model.process.enable=false", "-1"],
        ),
    ],
)
def test_retraining_needs_labels_and_batches_of_one_model(overrides: list[str], parts: list[str]) -> None:
    says(refused(*ITERATIVE, *overrides), *parts)
    load_config([*ITERATIVE])


def test_with_lora_a_teacher_is_a_reference_of_its_own() -> None:
    """And what is wrong with it is not said of the policy without its factors."""
    assert load_config([LORA])[0].actor_is_reference
    taught, _ = load_config([LORA, BUILTIN])
    assert (taught.actor_is_reference, taught.needs_reference_workers) == (False, True)
    message = refused(LORA, BUILTIN, SYNC)
    says(message, TEACHER)
    assert "factors" not in message


SHOWN = "algorithm.self_distillation"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([f"{ACTOR}.use_kl_loss=false"], [f"{SHOWN}.enable=true", f"{ACTOR}.use_kl_loss=false", "true"]),
        (["algorithm.use_kl_in_reward=true"], [f"{SHOWN}.enable=true", "algorithm.use_kl_in_reward=true", "false"]),
        (
            ["actor_rollout_ref.rollout.agent.default_agent_loop=external"],
            [f"{SHOWN}.enable=true", "default_agent_loop=external", "tool_agent"],
        ),
        ([f"{SHOWN}.success_threshold=null"], [f"{SHOWN}.feedback_name=null", f"{SHOWN}.success_threshold=null"]),
        (["actor_rollout_ref.rollout.n=1"], [f"{SHOWN}.feedback_name=null", "actor_rollout_ref.rollout.n=1"]),
        ([f"{SHOWN}.success_template=look"], [f"{SHOWN}.success_template=look", "{text}"]),
        ([f"{SHOWN}.feedback_template=look"], [f"{SHOWN}.feedback_template=look", "{text}"]),
    ],
)
def test_a_policy_that_teaches_itself_needs_a_loss_and_something_to_show(
    overrides: list[str], parts: list[str]
) -> None:
    says(refused("recipe=sdpo", *overrides), *parts)


def test_recorded_experts_are_those_of_another_prompt() -> None:
    replays = f"{ACTOR}.router_replay.mode=R3"
    with refuses(ConfigError, f"{SHOWN}.enable=true, {replays}", "disabled"):
        load_config(["recipe=sdpo", replays])


def test_a_policy_that_teaches_itself_needs_no_other_teacher() -> None:
    """Its reference may move while groups are sampled ahead, since it reads them afterwards; scores are asked for."""
    config, _ = load_config(["recipe=sdpo", "trainer.max_staleness=1"])
    assert config.algorithm.self_distillation.enable
    assert config.needs_reference_workers
    assert config.reward_function is None, "rows need a scorer"
    said = ("success_threshold=null", "feedback_name=hint")
    config, _ = load_config(["recipe=sdpo", "actor_rollout_ref.rollout.n=1", *(f"{SHOWN}.{each}" for each in said)])
    assert config.reward_function == "grpo_dist.rewards.optional"
