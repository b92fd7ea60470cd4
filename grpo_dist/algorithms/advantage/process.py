"""Process supervision: a reward for every step of a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.advantage.groups import Groups
from grpo_dist.algorithms.advantage.inputs import ADVANTAGE, AdvantageInputs


@ADVANTAGE.register("grpo_process", needs=("groups", "step_mask"))
def grpo_process(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A token's advantage is the sum of the normalised rewards of the steps that end at or after it.

    DeepSeekMath (arXiv 2402.03300), section 4.1.3: the rewards of all steps of all responses of a group are
    normalised together, r' = (r - mean) / (std + 1e-6), and A_t = sum of r' over steps that end at or after t.
    `step_mask` (N, T) is 1 on the last token of each step. A step's reward is the sum of the `token_level_rewards` of
    its tokens: its own score, and what else lies on them, such as a KL penalty; what lies behind the last step's end,
    such as an overlong penalty on the end-of-sequence token, belongs to the last step. A response without a step's end
    is one step. The standard deviation is the sample one and is left out without `norm_adv_by_std_in_grpo`. With one
    step per response this is `grpo`.
    """
    ends = batch.need("step_mask", "step_mask", "rewards every step and needs to know where they end").bool()
    ends = ends | (_last_trained(batch.response_mask) & ~ends.any(-1, keepdim=True))
    response = ends.nonzero()[:, 0]
    steps = Groups(batch.groups.ids[response], batch.groups.count)
    normalised = steps.normalise(
        _step_rewards(batch.token_level_rewards, ends), by_std=config["norm_adv_by_std_in_grpo"]
    )
    at_ends = torch.zeros_like(batch.token_level_rewards, dtype=torch.float64)
    at_ends[ends] = normalised.where(batch.groups.sizes[response] > 1, 0.0)
    advantages = at_ends.flip(-1).cumsum(-1).flip(-1).float() * batch.response_mask
    return advantages, advantages


def _step_rewards(rewards: Tensor, ends: Tensor) -> Tensor:
    """(S,) float64: the summed rewards of the tokens of each step, for the S ends in the order of `ends.nonzero()`."""
    count = ends.sum(-1, keepdim=True)  # at least 1
    within = torch.minimum(ends.cumsum(-1) - ends.long(), count - 1)  # behind the last end: the last step
    step = within + count.cumsum(0) - count
    total = torch.zeros(int(count.sum()), dtype=torch.float64, device=rewards.device)
    return total.index_add_(0, step.flatten(), rewards.double().flatten())


def _last_trained(mask: Tensor) -> Tensor:
    """(N, T) bool: the last token of each response that trains; of a response without one, the last of the row."""
    trains = (mask > 0) | ~(mask > 0).any(-1, keepdim=True)
    return trains & (trains.flip(-1).cumsum(-1).flip(-1) == 1)
