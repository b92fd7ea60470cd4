"""One response, scored as a run does it."""

from typing import Any

from grpo_dist.rewards import RewardFunction, RewardResult, load_reward_function, score_response


def scored(
    text: str, truth: Any, data_source: str = "mine", extra_info: Any = None, function: RewardFunction | None = None
) -> RewardResult:
    """The result of a response, by the built-in scorer of its data source where no function is given."""
    function = load_reward_function(None, "compute_score", {}) if function is None else function
    row = {"data_source": data_source, "ground_truth": truth, "extra_info": extra_info or {}}
    return score_response(function, solution_str=text, **row)
