"""Rules between the keys that correct for what sampler and trainer differ in, and that say when they do: key_rules.py
has the form of the texts.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.problems import between_keys
from grpo_dist.config.schema import RunConfig
from grpo_dist.plugins.names import SEQUENCE_LOSSES

CORRECTION = "algorithm.rollout_correction"


@between_keys
def correction_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong between the keys that correct for the sampler."""
    loss, correction = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.algorithm.rollout_correction
    own_bypass, reinforce = f"<{CORRECTION}.bypass_mode>", correction.loss_type == "reinforce"
    if correction.bypass_mode and reinforce and correction.rollout_is_batch_normalize:
        why = "these weights change during the update, so there is no mean over the batch; set one of the two"
        yield f"{own_bypass}, <{CORRECTION}.rollout_is_batch_normalize>: {why}"
    if correction.m2_threshold is not None and correction.bypass_mode:
        why = "the second moment is that of the whole batch by the log-probs that bypass_mode leaves out"
        yield f"<{CORRECTION}.m2_threshold>, {own_bypass}: {why}; set the first to null, or the second to false"
    if correction.m2_threshold is not None and loss in SEQUENCE_LOSSES[:2]:
        why = "the loss has one ratio for the whole sequence; choose another loss_mode, or set the first to null"
        yield f"<{CORRECTION}.m2_threshold>, <actor.policy_loss.loss_mode>: {why}"
    if reinforce and not correction.bypass_mode:
        why = "reinforce is a loss of bypass_mode; set bypass_mode=true, or actor.policy_loss.loss_mode=gpg"
        yield f"<{CORRECTION}.loss_type>, {own_bypass}: {why}"
    if reinforce and loss != "vanilla":
        yield f"<{CORRECTION}.loss_type>, <actor.policy_loss.loss_mode>: two losses; leave one of them at its default"
    if (correction.rollout_rs is None) != (correction.rollout_rs_threshold is None):
        yield f"<{CORRECTION}.rollout_rs>, <{CORRECTION}.rollout_rs_threshold>: set both or none"
