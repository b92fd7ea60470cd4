"""Names of the built-in estimators, losses and modes, and groups of them with common properties.

The config checks names before torch is imported, so they are listed here. The functions in algorithms/ register
themselves under these names; a test keeps the two equal.
"""

from __future__ import annotations

# Estimators that compare the responses of one prompt with each other ...
GROUP_ADV_ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "grpo_process",
    "rloo",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
)
# ... and all estimators.
ADV_ESTIMATORS = (*GROUP_ADV_ESTIMATORS, "reinforce_plus_plus", "remax", "gae", "distill")
SCORELESS_ADV_ESTIMATORS = ("distill",)  # those that only the KL penalty trains, not the scores
SAMPLED_KL_TYPES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
KL_LOSS_TYPES = (*SAMPLED_KL_TYPES, *(f"{name}+" for name in SAMPLED_KL_TYPES), "full")
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LOSS_MODES = (
    "vanilla",
    "gspo",
    "geo_mean",
    "cispo",
    "sapo",
    "gpg",
    "dro",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
)
ROLLOUT_ENGINES = ("vllm",)
AGENT_LOOPS = ("single_turn_agent", "tool_agent", "external")
TOKEN_SELECTING_LOSSES = ("clip_cov", "kl_cov")  # select tokens over the whole batch, before the update
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")  # published as a mean over sequences
# The reward functions that return the score of the reward model, a weighted sum of others, and the built-in scorer's
# score where a row has what that needs.
REWARD_MODEL_FUNCTION, WEIGHTED_FUNCTION = "grpo_dist.rewards.reward_model", "grpo_dist.rewards.weighted"
OPTIONAL_FUNCTION = "grpo_dist.rewards.optional"
# In `extra_info`: the score of the reward model, and whether the conversation was cut for it (1 or 0).
RM_SCORE, RM_CLIPPED = "rm_score", "rm_clipped"
RM_STEP_SCORES = "rm_step_scores"  # there too: the score of each step, by a process reward model
OVERLONG_PENALTY = "overlong_penalty"  # name, among the reward's values, of the penalty of reward.overlong_buffer
WEIGHT_TRANSPORTS = ("object_store", "broadcast", "ipc")
