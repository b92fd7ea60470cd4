"""Pure maths: tensors and numbers in, tensors out. Loads neither Ray nor vLLM nor the config."""

from grpo_dist.algorithms.advantage import compute_advantage
from grpo_dist.algorithms.aggregate import agg_loss
from grpo_dist.algorithms.correction import compute_rollout_correction
from grpo_dist.algorithms.kl import kl_penalty
from grpo_dist.algorithms.losses import compute_value_loss
from grpo_dist.algorithms.objective import policy_objective
from grpo_dist.algorithms.policy_loss import compute_policy_loss

__all__ = [
    "agg_loss",
    "compute_advantage",
    "compute_policy_loss",
    "compute_rollout_correction",
    "compute_value_loss",
    "kl_penalty",
    "policy_objective",
]
