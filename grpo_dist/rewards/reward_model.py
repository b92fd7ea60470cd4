"""The score of the reward model as a reward function: alone, or as a part of grpo_dist.rewards.weighted.

    reward_model.enable=true reward_model.model.path=Skywork/Skywork-Reward-Llama-3.1-8B
    custom_reward_function.path=grpo_dist.rewards.weighted
    custom_reward_function.reward_kwargs='{functions: [
        {path: grpo_dist.rewards.reward_model, weight: 1.0},
        {path: null, weight: 0.5, label: rule},
        {path: examples/rewards/xml_tags.py, weight: 0.1}]}'

A function of yours finds the score in `extra_info["rm_score"]`, and those of the response's steps, by a process reward
model, in `extra_info["rm_step_scores"]`.
"""

from __future__ import annotations

from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import REWARD_MODEL_FUNCTION, RM_SCORE, RM_STEP_SCORES


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Return the reward model's score, whatever the ground truth is; also those of steps, if it judges steps."""
    if RM_SCORE not in extra_info:
        raise ConfigError(f"{REWARD_MODEL_FUNCTION} needs a reward model; set reward_model.enable=true")
    steps = {"step_scores": extra_info[RM_STEP_SCORES]} if RM_STEP_SCORES in extra_info else {}
    return {"score": float(extra_info[RM_SCORE]), **steps}
