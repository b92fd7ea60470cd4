from __future__ import annotations

import numpy as np
import pytest

from grpo_dist.errors import RewardError
from grpo_dist.trainer.rollout.filter import informative, require_metric
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.event_loop import run
from tests.messages import refuses
from tests.trainer.instant_pump import FILTER, MIXED, make_sampler


def scored(**columns: list[float]) -> DataProtoRef:
    """A group with these values."""
    small = {"score" if name == "score" else f"reward_extra/{name}": np.array(v) for name, v in columns.items()}
    return DataProtoRef(small=small, num_rows=len(columns["score"]))


def test_the_metric_may_be_an_extra_value() -> None:
    group = scored(score=[1.0, 2.0], acc=[1.0, 1.0])
    assert informative(group, "score")
    assert not informative(group, "acc")


@pytest.mark.parametrize(
    ("acc", "informs"),
    [
        ([1.0, np.nan, 0.0, 1.0], True),
        ([np.nan, np.nan, 0.0, 1.0], True),
        ([1.0, np.nan, 1.0, 1.0], False),
        ([np.nan, np.nan, np.nan, 1.0], False),
        ([np.nan] * 4, False),
    ],
)
def test_a_group_is_judged_by_the_responses_that_have_the_value(acc: list[float], informs: bool) -> None:
    assert informative(scored(score=[1.0, 2.0, 3.0, 4.0], acc=acc), "acc") is informs


def test_a_value_that_no_response_has_ends_the_run_and_one_that_a_group_misses_does_not() -> None:
    groups = [scored(score=[1.0, 2.0]), scored(score=[1.0, 2.0], acc=[1.0, 0.0])]
    assert [informative(group, "acc") for group in groups] == [False, True]
    require_metric(groups, "acc")
    key = "algorithm.filter_groups.metric"
    with refuses(RewardError, f"{key}=exact", "score, acc", "'exact'", f"{key}=score"):
        require_metric(groups, "exact")
    with refuses(RewardError, f"{key}=fluency", f"{key}=score"):
        run(make_sampler({0: MIXED, 1: MIXED}, FILTER, f"{key}=fluency").rollout(1))
