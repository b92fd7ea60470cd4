"""Corrections for the sampler: each rule is broken once."""

from __future__ import annotations

import pytest

from tests.config.refusals import refused
from tests.messages import says
from tests.plan.test_rules import ACTOR

CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [f"{CORRECTION}.m2_threshold=0.04", f"{CORRECTION}.bypass_mode=true"],
            [f"{CORRECTION}.m2_threshold=0.04", f"{CORRECTION}.bypass_mode=true", "null"],
        ),
        (
            [f"{CORRECTION}.m2_threshold=0.04", f"{ACTOR}.policy_loss.loss_mode=geo_mean"],
            [f"{CORRECTION}.m2_threshold=0.04", f"{ACTOR}.policy_loss.loss_mode=geo_mean", "null"],
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is_batch_normalize=true"],
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is_batch_normalize=true"],
        ),
        (
            [f"{CORRECTION}.loss_type=reinforce"],
            [f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.bypass_mode=false"],
        ),
        (
            [
                f"{CORRECTION}.bypass_mode=true",
                f"{CORRECTION}.loss_type=reinforce",
                f"{ACTOR}.policy_loss.loss_mode=gspo",
                f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            ],
            [f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.policy_loss.loss_mode=gspo"],
        ),
        (
            [f"{CORRECTION}.rollout_rs=token_k1"],
            [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=null", "both"],
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.top_entropy_quantile=0.2"],
            [f"{ACTOR}.top_entropy_quantile=0.2", f"{CORRECTION}.bypass_mode=true"],
        ),
        (
            ["trainer.health.kl.action=stop", f"{ACTOR}.use_kl_loss=false"],
            ["trainer.health.kl.action=stop", f"{ACTOR}.use_kl_loss=false"],
        ),
        (
            ["trainer.health.rollout_mismatch.action=stop", f"{CORRECTION}.bypass_mode=true"],
            ["trainer.health.rollout_mismatch.action=stop", f"{CORRECTION}.bypass_mode=true"],
        ),
        (
            ["trainer.health.entropy.action=stop", f"{CORRECTION}.bypass_mode=true"],
            ["trainer.health.entropy.action=stop", f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.entropy_coeff=0.0"],
        ),
        (
            [f"{ACTOR}.top_entropy_quantile=0.2", f"{ACTOR}.policy_loss.loss_mode=geo_mean"],
            [f"{ACTOR}.top_entropy_quantile=0.2", f"{ACTOR}.policy_loss.loss_mode=geo_mean"],
        ),
    ],
)
def test_corrections_and_selections_that_do_not_go_together(overrides, parts):
    says(refused(*overrides), *parts)
