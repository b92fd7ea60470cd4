from __future__ import annotations

import pytest

from grpo_dist.names import OPTIONAL_FUNCTION
from grpo_dist.rewards import load_reward_function, score_response


@pytest.mark.parametrize(
    ("data_source", "ground_truth", "score"),
    [("arithmetic", "3", 1.0), ("arithmetic", "4", 0.0), ("arithmetic", None, 0.0), ("another", "3", 0.0)],
)
def test_only_what_can_be_scored_is(data_source: str, ground_truth: str | None, score: float) -> None:
    function = load_reward_function(OPTIONAL_FUNCTION, "compute_score", {})
    found = score_response(
        function, data_source=data_source, solution_str="#### 3", ground_truth=ground_truth, extra_info={}
    )
    assert found.score == score
    assert ("acc" in found.extra) == (data_source == "arithmetic" and ground_truth is not None)
