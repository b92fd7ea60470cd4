"""Rules on models beside the policy: a reference of another model, and a reward model that is retrained."""

from __future__ import annotations

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from tests.config.refusals import broken, refused
from tests.messages import refuses, says

ACTOR, TEACHER = "actor_rollout_ref.actor", "actor_rollout_ref.ref.model.path"
SYNC = "actor_rollout_ref.ref.ref_model_sync_steps=2"
BUILTIN = f"{TEACHER}=builtin:tiny-qwen3"
SEVERAL = f"{TEACHER}={{a: builtin:tiny-qwen3, b/c: builtin:tiny-qwen3}}"
LORA = "actor_rollout_ref.model.lora_rank=2"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        broken(also=[f"{TEACHER}=null", "algorithm.adv_estimator=distill"], beside=["recipe=distill"]),
        broken(
            BUILTIN, also=[f"{ACTOR}.use_kl_loss=false", "algorithm.use_kl_in_reward=false"], beside=["recipe=cispo"]
        ),
        broken(BUILTIN, SYNC, also=["-1"]),
        broken(f"{ACTOR}.kl_loss_type=full", also=["builtin:tiny-qwen3", "k2"], beside=[SEVERAL]),
        broken(also=["./nowhere", "folder"], beside=[SEVERAL.replace("builtin:tiny-qwen3}", "./nowhere}")]),
        broken(f"{TEACHER}=./nowhere", also=["folder"]),
        broken(
            BUILTIN,
            also=["100 positions", "actor_rollout_ref.ref.model.override_config"],
            beside=["+actor_rollout_ref.ref.model.override_config.max_position_embeddings=100"],
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
        broken("custom_reward_function.path=null", also=[FREQ, "grpo_dist.rewards.weighted"]),
        broken("trainer.max_staleness=1", also=[FREQ], beside=[SYNC.replace("=2", "=-1")]),
        broken(
            also=[FREQ, "algorithm.adv_estimator=grpo", "grpo_process"], beside=["reward_model.process.enable=true"]
        ),
        broken("algorithm.adv_estimator=grpo_process", also=[FREQ, "reward_model.process.enable=false", "-1"]),
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
        broken(f"{ACTOR}.use_kl_loss=false", also=[f"{SHOWN}.enable=true", "true"]),
        broken("algorithm.use_kl_in_reward=true", also=[f"{SHOWN}.enable=true", "false"]),
        broken(
            also=[f"{SHOWN}.enable=true", "default_agent_loop=external", "tool_agent"],
            beside=["actor_rollout_ref.rollout.agent.default_agent_loop=external"],
        ),
        broken(f"{SHOWN}.success_threshold=null", also=[f"{SHOWN}.feedback_name=null"]),
        broken("actor_rollout_ref.rollout.n=1", also=[f"{SHOWN}.feedback_name=null"]),
        broken(f"{SHOWN}.success_template=look", also=["{text}"]),
        broken(f"{SHOWN}.feedback_template=look", also=["{text}"]),
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
