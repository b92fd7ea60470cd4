"""The score of the reward model as a reward function: alone, or as a part of grpo_dist.rewards.weighted.

    reward_model.enable=true reward_model.model.path=Skywork/Skywork-Reward-Llama-3.1-8B
    custom_reward_function.path=grpo_dist.rewards.weighted
    custom_reward_function.reward_kwargs='{functions: [
        {path: grpo_dist.rewards.reward_model, weight: 1.0},
        {path: null, weight: 0.5, label: rule},
        {path: examples/rewards/xml_tags.py, weight: 0.1}]}'

A function of yours finds the score in `extra_info["rm_score"]`.
"""

from __future__ import annotations

from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.names import REWARD_MODEL_FUNCTION, RM_SCORE


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """What the reward model says of the response, whatever the ground truth is.

    Raises:
        ConfigError: there is no reward model.
    """
    if RM_SCORE not in extra_info:
        raise ConfigError(f"{REWARD_MODEL_FUNCTION} needs a reward model; set reward_model.enable=true")
    return float(extra_info[RM_SCORE])
