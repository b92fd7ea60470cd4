"""The built-in estimators, losses and modes that config values may name, and what their names alone tell.

The config checks names before torch is loaded, so they are listed here. The functions are in algorithms/ and register
themselves there under these names; a test keeps the two equal.
"""

from __future__ import annotations

# Those that compare the responses of one prompt with each other ...
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
# ... and those that do not.
ADV_ESTIMATORS = (*GROUP_ADV_ESTIMATORS, "reinforce_plus_plus", "remax", "gae")
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
AGENT_LOOPS = ("single_turn_agent",)
TOKEN_SELECTING_LOSSES = ("clip_cov", "kl_cov")  # choose tokens by the whole batch, before the update
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")  # published as a mean over sequences
OVERLONG_PENALTY = "overlong_penalty"  # what reward.overlong_buffer takes off, among the reward's values
WEIGHT_TRANSPORTS = ("object_store", "broadcast", "ipc")
