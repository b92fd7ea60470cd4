"""Corrections for the sampler: each rule is broken once, and what goes together passes."""

from __future__ import annotations

import pytest

from grpo_dist.plan.commands import load_config
from tests.config.refusals import broken, refused
from tests.messages import says
from tests.plan.test_rules import ACTOR, ROLLOUT

CORRECTION = "algorithm.rollout_correction"
REINFORCE = f"{CORRECTION}.loss_type=reinforce"
M2 = f"{CORRECTION}.m2_threshold=0.04"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        broken(f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is_batch_normalize=true", beside=[REINFORCE]),
        broken(also=[f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.bypass_mode=false"], beside=[REINFORCE]),
        broken(
            f"{ACTOR}.policy_loss.loss_mode=gspo",
            also=[f"{CORRECTION}.loss_type=reinforce"],
            beside=[f"{CORRECTION}.bypass_mode=true", REINFORCE, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        ),
        broken(f"{CORRECTION}.rollout_rs=token_k1", also=[f"{CORRECTION}.rollout_rs_threshold=null", "both"]),
        broken(f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.top_entropy_quantile=0.2"),
        broken(f"{CORRECTION}.bypass_mode=true", "algorithm.adv_estimator=optimal_token_baseline", also=["false"]),
        broken(f"{CORRECTION}.bypass_mode=true", "algorithm.adv_estimator=rl_zvp", also=["false"]),
        broken(
            also=["critic.loss_agg_mode=prompt-mean", "token-mean"],
            beside=["algorithm.adv_estimator=gae", f"{ACTOR}.loss_agg_mode=prompt-mean"],
        ),
        *(
            ([key, f"algorithm.adv_estimator={estimator}"], [key, f"algorithm.adv_estimator={estimator}", "false"])
            for key in ("algorithm.mask_equal_groups=true",)
            for estimator in ("rl_zvp", "rae", "gae", "reinforce_plus_plus_baseline")
        ),
        broken(f"{ACTOR}.observation_coeff=0.1", also=["default_agent_loop=single_turn_agent", 0]),
        broken("trainer.health.kl.action=stop", f"{ACTOR}.use_kl_loss=false"),
        broken("trainer.health.rollout_mismatch.action=stop", f"{CORRECTION}.bypass_mode=true"),
        broken(
            "trainer.health.entropy.action=stop", f"{CORRECTION}.bypass_mode=true", also=[f"{ACTOR}.entropy_coeff=0.0"]
        ),
        broken(f"{ACTOR}.top_entropy_quantile=0.2", f"{ACTOR}.policy_loss.loss_mode=geo_mean"),
    ],
)
def test_corrections_and_selections_that_do_not_go_together(overrides, parts):
    says(refused(*overrides), *parts)


def test_a_geometric_mean_has_one_advantage_for_a_response() -> None:
    """Not one for each of its agents, turns, steps or tokens, whose mean is 0 in a game that one of them wins."""
    geo_mean = f"{ACTOR}.policy_loss.loss_mode=geo_mean", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
    loop = f"{ROLLOUT}.agent.default_agent_loop=tool_agent", f"{ROLLOUT}.agent.agent_kwargs={{tools: [math:sqrt]}}"
    says(refused(*geo_mean, *loop, "algorithm.credit=agent"), geo_mean[0], "algorithm.credit=agent", "gspo")
    for estimator, *more in (
        ("grpo_process",),
        ("gigpo", *loop),
        ("gae",),
        ("optimal_token_baseline",),
        ("reinforce_plus_plus", "algorithm.gamma=0.9"),
        ("remax", "algorithm.use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=false"),
    ):
        chosen = f"algorithm.adv_estimator={estimator}"
        says(refused(*geo_mean, chosen, *more), geo_mean[0], chosen, "gspo")
    for fitting in ("rloo", "reinforce_plus_plus", "remax", "rae"):
        load_config([*geo_mean, f"algorithm.adv_estimator={fitting}"])


@pytest.mark.parametrize(
    "other",
    [f"{CORRECTION}.bypass_mode=true", *(f"{ACTOR}.policy_loss.loss_mode={loss}" for loss in ("gspo", "geo_mean"))],
)
def test_the_second_moment_is_of_tokens_and_of_the_whole_batch(other: str) -> None:
    says(refused(M2, other), M2, other, "null")


def test_bypass_mode_leaves_weights_to_the_ratio() -> None:
    """As verl, whose scripts set rollout_is beside it; with reinforce the weights are the loss's."""
    ours = [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"]
    config, said = load_config([*ours, f"{CORRECTION}.rollout_is_batch_normalize=true"])
    says(said, *ours)
    assert (config.rollout_is, load_config([*ours, REINFORCE])[0].rollout_is) == (None, "token")


def test_the_other_masks_stand_beside_bypass_mode() -> None:
    kpop = (f"{CORRECTION}.rollout_rs=token_kpop", f"{CORRECTION}.rollout_rs_threshold=0.1")
    load_config([f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.off_policy_mask_threshold=0.5", *kpop])
    load_config([M2, *kpop])


@pytest.mark.parametrize("key", ["m2_threshold", "off_policy_mask_threshold"])
@pytest.mark.parametrize("value", ["0", "-0.1", "token"])
def test_thresholds_are_positive(key: str, value: str) -> None:
    says(refused(f"{CORRECTION}.{key}={value}"), f"{CORRECTION}.{key}={value}")


def test_in_the_reward_no_policy_moves() -> None:
    says(refused("algorithm.kl_penalty=unbiased_k3"), "algorithm.kl_penalty=unbiased_k3", "k3")
    load_config([f"{ACTOR}.kl_loss_type=unbiased_k3"])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("opsm_delta=0.1", f"{CORRECTION}.off_policy_mask_threshold"),
        ("use_opsm=true", f"{CORRECTION}.off_policy_mask_threshold=0.5"),
        ("use_unbiased_kl=true", f"{ACTOR}.kl_loss_type=unbiased_k3"),
        ("use_bias_correction_kl=true", f"{ACTOR}.kl_loss_type=unbiased_k3"),
    ],
)
def test_names_of_others_are_answered(theirs: str, ours: str) -> None:
    says(refused(f"algorithm.{theirs}"), f"algorithm.{theirs.split('=')[0]}", ours)
