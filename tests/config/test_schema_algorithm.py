"""The values of `algorithm`'s keys."""

from __future__ import annotations

import pytest

from grpo_dist.config.schema import AlgorithmConfig
from grpo_dist.plan.commands import load_config
from grpo_dist.plugins.names import ADV_ESTIMATORS
from tests.config.refusals import refused
from tests.messages import says


def algorithm(*overrides: str) -> AlgorithmConfig:
    return load_config(list(overrides))[0].algorithm


def test_an_estimator_is_built_in_or_a_function_of_yours() -> None:
    rest = set(ADV_ESTIMATORS) - {
        "gdpo",
        "distill",
        "gigpo",
    }  # need components, a teacher, an agent
    for name in (*rest, "math:sqrt"):
        assert algorithm(f"algorithm.adv_estimator={name}").adv_estimator == name
    says(refused("algorithm.adv_estimator=gpro"), "algorithm.adv_estimator", "gpro", "grpo")


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [("credit", "turn", "episode"), ("gamma", "1.5", "1"), ("lam", "-1", "0"), ("kl_ctrl.type", "moving", "fixed")],
)
def test_other_values_are_refused_with_those_that_may_be(key: str, value: str, part: str) -> None:
    says(refused(f"algorithm.{key}={value}"), f"algorithm.{key}", value, part)


def test_an_episode_is_one_by_default() -> None:
    assert (algorithm().credit, algorithm().min_group_size) == ("episode", None)
