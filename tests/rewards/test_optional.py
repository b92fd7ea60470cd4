from __future__ import annotations

import pytest

from grpo_dist.plugins.names import OPTIONAL_FUNCTION
from grpo_dist.rewards import load_reward_function
from tests.rewards.scoring import scored


@pytest.mark.parametrize(
    ("data_source", "ground_truth", "score"),
    [("arithmetic", "3", 1.0), ("arithmetic", "4", 0.0), ("arithmetic", None, 0.0), ("another", "3", 0.0)],
)
def test_only_what_can_be_scored_is(data_source: str, ground_truth: str | None, score: float) -> None:
    function = load_reward_function(OPTIONAL_FUNCTION, "compute_score", {})
    result = scored("#### 3", ground_truth, data_source, function=function)
    assert result.score == score
    assert ("acc" in result.extra) == (data_source == "arithmetic" and ground_truth is not None)
