"""The built-in scorer's score of a response where the row has what that needs, for runs that scores do not train.

It is the reward function of algorithm.adv_estimator=distill, unless another one is named: prompts alone are enough for
such a run, and where there are ground truths its record shows how good the responses are.
"""

from __future__ import annotations

from typing import Any

from grpo_dist.rewards.load import built_in_scorer, score_by_data_source


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """Return the score; 0 where the row has no ground truth, or its data source no built-in scorer."""
    if ground_truth is None or built_in_scorer(data_source) is None:
        return 0.0
    return score_by_data_source(data_source, solution_str, ground_truth, extra_info)
