"""A run's reward function in a process of its own, for the commands that score without Ray."""

from __future__ import annotations

from dataclasses import fields

from grpo_dist.config.problems import shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards.forms import Sample
from grpo_dist.rewards.scorer import Scorer

_OF_PROMPT = {field.name for field in fields(Prompt)}


def start_scorer(config: RunConfig) -> Scorer:
    """The reward function of a config, as its reward processes have it; to be stopped.

    Raises:
        ConfigError: it cannot be loaded.
    """
    scorer = Scorer(*config.reward_code, timeout_s=config.reward.timeout_s)
    try:
        scorer.start()
    except RewardError as error:
        named = shown(config.custom_reward_function.path)
        raise ConfigError(f"custom_reward_function.path={named}: {error}") from error
    return scorer


def sample_of(prompt: Prompt, text: str) -> Sample:
    """A response to a row, with what a reward process knows of the row."""
    row = {field.name: getattr(prompt, field.name) for field in fields(Sample) if field.name in _OF_PROMPT}
    return Sample(solution_str=text, **row)
