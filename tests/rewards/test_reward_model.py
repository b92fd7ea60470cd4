from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import REWARD_MODEL_FUNCTION
from grpo_dist.rewards import RewardResult, load_reward_function
from tests.messages import refuses
from tests.rewards.scoring import scored

WEIGHTED = {
    "functions": [{"path": REWARD_MODEL_FUNCTION, "weight": 2.0}, {"path": None, "weight": 0.5, "label": "rule"}]
}


def by(path: str, kwargs: dict, **extra_info: Any) -> RewardResult:
    return scored("#### 3", "3", "arithmetic", extra_info, load_reward_function(path, "compute_score", kwargs))


def test_alone_it_is_the_reward() -> None:
    assert by(REWARD_MODEL_FUNCTION, {}, rm_score=-1.25).score == -1.25


def test_with_a_rule_it_is_weighed_and_each_is_logged() -> None:
    """2 * (-1.25) + 0.5 * 1."""
    found = by("grpo_dist.rewards.weighted", WEIGHTED, rm_score=-1.25)
    assert found.score == pytest.approx(-2.0)
    assert (found.extra["reward_model"], found.extra["rule"]) == (-1.25, 1.0)


def test_of_steps() -> None:
    """A process reward model's; the rule judges the whole response, which counts at its last step: 2 * s + 0.5."""
    steps = {"rm_score": 0.25, "rm_step_scores": [0.5, 0.25]}
    found = by(REWARD_MODEL_FUNCTION, {}, **steps)
    assert (found.score, found.step_scores, found.judged_steps) == (0.25, (0.5, 0.25), {})
    found = by("grpo_dist.rewards.weighted", WEIGHTED, **steps)
    assert (found.score, found.step_scores) == (1.0, (1.0, 1.0))
    assert found.judged_steps == {"reward_model": (0.5, 0.25)}
    assert by(REWARD_MODEL_FUNCTION, {}, rm_score=0.5, rm_step_scores=[]).step_scores == ()


def test_without_a_reward_model() -> None:
    with refuses(ConfigError, "reward_model.enable=true"):
        by(REWARD_MODEL_FUNCTION, {})
