"""Process supervision: a reward for every step of a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.advantage.groups import Groups
from grpo_dist.algorithms.advantage.inputs import ADVANTAGE, AdvantageInputs


@ADVANTAGE.register("grpo_process")
def grpo_process(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A token's advantage is the sum of the normalised rewards of the steps that end at or after it.

    DeepSeekMath (arXiv 2402.03300), section 4.1.3: the rewards of all steps of all responses of a group are
    normalised together, r' = (r - mean) / (std + 1e-6), and A_t = sum of r' over steps that end at or after t.
    `step_mask` (N, T) is 1 on the last token of each step, where `token_level_rewards` has its reward; rewards
    elsewhere do not count. The standard deviation is the sample one and is left out without
    `norm_adv_by_std_in_grpo`. With one step per response this is `grpo`.
    """
    ends = batch.need("step_mask", "step_mask", "rewards every step and needs to know where they end").bool()
    response, position = ends.nonzero(as_tuple=True)
    rewards = batch.token_level_rewards[response, position]
    steps = Groups(batch.groups.ids[response], batch.groups.count)
    normalised = steps.normalise(rewards, by_std=config["norm_adv_by_std_in_grpo"])
    normalised = normalised.where(batch.groups.sizes[response] > 1, 0.0)
    at_ends = torch.zeros_like(batch.token_level_rewards, dtype=torch.float64)
    at_ends[response, position] = normalised
    advantages = at_ends.flip(-1).cumsum(-1).flip(-1).float() * batch.response_mask
    return advantages, advantages
