"""Scorers, and the one way to load and call them. Knows no Ray."""

from grpo_dist.rewards.contract import RewardFunction, RewardResult, score_response
from grpo_dist.rewards.load import check_data_sources, load_reward_function

__all__ = ["RewardFunction", "RewardResult", "check_data_sources", "load_reward_function", "score_response"]
