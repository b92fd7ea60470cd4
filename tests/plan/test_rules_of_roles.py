"""Rules on models beside the policy: a reference of another model, and a reward model that is retrained."""

from __future__ import annotations

import pytest

from grpo_dist.plan.commands import load_config
from tests.config.refusals import refused
from tests.messages import says

ACTOR, TEACHER = "actor_rollout_ref.actor", "actor_rollout_ref.ref.model.path"
SYNC = "actor_rollout_ref.ref.ref_model_sync_steps=2"
BUILTIN = f"{TEACHER}=builtin:tiny-qwen3"
LORA = "actor_rollout_ref.model.lora_rank=2"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["recipe=distill"], [f"{TEACHER}=null", "algorithm.adv_estimator=distill"]),
        (["recipe=cispo", BUILTIN], [BUILTIN, f"{ACTOR}.use_kl_loss=false", "algorithm.use_kl_in_reward=false"]),
        ([BUILTIN, SYNC], [SYNC, BUILTIN, "-1"]),
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
        (["reward_model.enable=false", "custom_reward_function.path=null"], [FREQ, "reward_model.enable=false", "-1"]),
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
