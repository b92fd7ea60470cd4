"""The config's options of advantages and loss, as the maths takes them. Columns: test_settings.py."""

from __future__ import annotations

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.trainer.loss_settings import objective_settings, target_settings

ACTOR = "actor_rollout_ref.actor"


def load(*overrides: str):
    return load_config(list(overrides))[0]


def test_the_scale_of_seq_mean_token_sum_norm_is_the_longest_response() -> None:
    assert objective_settings(load()).actor.loss_scale_factor == 64
    assert objective_settings(load(f"{ACTOR}.loss_scale_factor=100")).actor.loss_scale_factor == 100


def test_options_of_the_loss_arrive() -> None:
    options = objective_settings(load(f"{ACTOR}.tau_pos=2", f"{ACTOR}.policy_loss.dro_beta=0.5")).options
    assert (options["tau_pos"], options["dro_beta"], options["clip_ratio"], options["clip_ratio_low"]) == (
        2,
        0.5,
        0.2,
        None,
    )


def test_options_of_the_targets_arrive() -> None:
    targets = target_settings(
        load(
            "algorithm.adv_estimator=gdpo",
            "algorithm.gdpo_reward_keys=[format,acc]",
            "algorithm.gdpo_reward_weights=[1,0.5]",
            "algorithm.rollout_correction.rollout_rs=token_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=2",
            "algorithm.mask_truncated_responses=true",
        )
    )
    assert targets.options["gdpo_reward_keys"] == ("format", "acc")
    assert targets.options["gdpo_reward_weights"] == (1.0, 0.5)
    assert targets.kl_penalty is None
    assert target_settings(load("algorithm.use_kl_in_reward=true")).kl_penalty == "kl"
    assert targets.rollout_correction["rollout_rs"] == "token_k1"
    assert targets.mask_truncated


@pytest.mark.parametrize(
    ("overrides", "loss_mode", "corrects"),
    [
        ((), "vanilla", False),
        (("bypass_mode=true",), "vanilla", False),
        (("bypass_mode=true", "rollout_rs=token_k1", "rollout_rs_threshold=2"), "vanilla", True),
        (("bypass_mode=true", "loss_type=reinforce", "rollout_is=token"), "gpg", True),
    ],
)
def test_bypass_mode_corrects_in_the_objective(overrides: tuple, loss_mode: str, corrects: bool) -> None:
    config = load(*(f"algorithm.rollout_correction.{override}" for override in overrides))
    objective = objective_settings(config)
    assert (objective.actor.policy_loss.loss_mode, objective.correction is not None, objective.weighted) == (
        loss_mode,
        corrects,
        False,
    )


def test_masks_by_advantage_arrive() -> None:
    """M2PO's needs the old log-probs before the update, the other one the sampler's during it."""
    key = "algorithm.rollout_correction"
    plain = load()
    assert (plain.on_policy, target_settings(plain).m2_threshold) == (True, None)
    assert objective_settings(plain).off_policy_threshold is None
    bounded = load(f"{key}.m2_threshold=0.04")
    targets, objective = target_settings(bounded), objective_settings(bounded)
    assert (bounded.needs_old_log_probs, targets.m2_threshold, objective.weighted) == (True, 0.04, True)
    assert "rollout_is_weights" in objective.columns
    for mode in ("false", "true"):
        masked = objective_settings(load(f"{key}.off_policy_mask_threshold=0.5", f"{key}.bypass_mode={mode}"))
        assert (masked.off_policy_threshold, masked.weighted) == (0.5, False)
        assert "rollout_log_probs" in masked.columns
    assert "m2_threshold" not in targets.rollout_correction


def test_a_batch_of_one_optimizer_step_is_corrected_in_the_objective() -> None:
    stale = objective_settings(load("trainer.max_staleness=1", f"{ACTOR}.use_kl_loss=false"))
    assert stale.correction == {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    assert stale.columns == ("advantages", "rollout_log_probs")
    several = objective_settings(load("trainer.max_staleness=1", f"{ACTOR}.ppo_epochs=2"))
    assert (several.correction, several.weighted) == (None, True)
