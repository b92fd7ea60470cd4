"""A row's own answer, as a response that the run's reward function scores, without what only a run has."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from grpo_dist.checks.own_code import started_scorer
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import REWARD_MODEL_FUNCTION
from grpo_dist.rewards.contract import Sample
from grpo_dist.rewards.scorer import Scorer

# Columns, and entries of extra_info, that hold a whole answer, beside the ground truth that it is compared with.
OWN_ANSWERS = ("completion", "solution", "response", "answer")
# Of an own answer that is a ground truth alone.
FORMS = ("{0}", "#### {0}", "\\boxed{{{0}}}", "<answer>{0}</answer>", "<think>\n\n</think>\n<answer>{0}</answer>")


def scorer_alone(config: RunConfig) -> AbstractContextManager[Scorer]:
    """Start the reward function for a block, without what only a run has."""
    if config.reward_function == REWARD_MODEL_FUNCTION:
        raise ConfigError(
            "reward_model.enable=true: the reward is the score of the reward model, which only a run's workers can "
            "compute (trainer.val_only=true); set custom_reward_function.path=FILE to score with a function"
        )
    return started_scorer(config)


def sample_of(prompt: Prompt, text: str, **more: Any) -> Sample:
    """Return a response to a row, with what a reward process knows of the row, and `more` fields of it."""
    of_row = {field.name: getattr(prompt, field.name) for field in fields(Sample) if hasattr(prompt, field.name)}
    return Sample(solution_str=text, **of_row, **more)


def own_answer(prompt: Prompt) -> tuple[str, str]:
    """Return the whole answer that a row has, else its ground truth, and where that comes from."""
    for name in OWN_ANSWERS:
        if isinstance(text := {**prompt.columns, **prompt.extra_info}.get(name), str) and text:
            return text, f"the row's {name}"
    truth = prompt.ground_truth
    if truth in (None, ""):
        how = "give one with --answer TEXT, or a policy with --player FILE.py:FUNCTION"
        raise ConfigError(f"{prompt.location}: the row has no answer of its own; {how}")
    return truth if isinstance(truth, str) else json.dumps(truth, default=str), "the row's ground truth"
