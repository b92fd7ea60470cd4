from __future__ import annotations

import numpy as np
import pytest

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError, RewardError
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.rollout.job import (
    RolloutJob,
    describe_failures,
    episode_metrics,
    group_seed,
    informative,
    require_metric,
)
from grpo_dist.workers.rollout import GroupRequest
from grpo_dist.workers.scorer import Task
from tests.messages import refuses, says
from tests.trainer.instant_pump import FILTER, MIXED, make_sampler

TASK = Task("", "", {})


@pytest.mark.parametrize(("score", "told"), [(None, "null"), (0.0, "0"), (-1.5, "-1.5")])
def test_what_is_told_of_failures(score: float | None, told: str) -> None:
    (told_of,) = describe_failures(["ValueError: no"] * 3, [], score)
    says(told_of, "3 responses", f"reward.failure_score={told}", "ValueError")
    (told_of,) = describe_failures(["ValueError: no"], [], score)
    says(told_of, "1 response", f"reward.failure_score={told}")


def test_what_is_told_of_episodes_that_failed() -> None:
    (told,) = describe_failures([], [AgentError("loop.py: KeyError"), AgentError("later")], None)
    says(told, "2 groups", "loop.py: KeyError")
    assert "later" not in told
    assert list(describe_failures([], [], None)) == []


def test_a_batch_is_of_what_there_is_and_if_there_is_nothing_says_why() -> None:
    group, scores = DataProtoRef(num_rows=2), DataProtoRef(num_rows=2)
    job = RolloutJob([], {1: group}, {1: scores}, failed={0: AgentError("no server")})
    assert len(job.batch()) == 2
    with refuses(AgentError, "no server"):
        RolloutJob([], failed={0: AgentError("no server")}).batch()


def test_failed_attempts_and_what_they_waste_are_counted() -> None:
    """Three groups of 4. Of the first an episode has failed once; the second lacks one, which has failed twice, and the
    third has ended with the second failure of another: 5 + 5 + 5 attempts, of which 1 + 2 + 5 do not train.
    """
    again, last = AgentError("again"), AgentError("last", "timeout", was_last=True)
    requests = [GroupRequest(uid, np.array([1]), SamplingSettings(4, 1.0, 1.0, -1, 8, 0), TASK) for uid in "abc"]
    first, second = RolloutJob(requests[:2]), RolloutJob(requests[2:], failed={0: last})
    first.failed_attempts |= {0: [again], 1: [again, last]}
    second.failed_attempts[0] += [again, last]
    assert episode_metrics([first, second]) == {
        "agent/failures/error": 3.0,
        "agent/failures/timeout": 2.0,
        "agent/missing_episodes": 1.0,
        "agent/dropped_groups": 1.0,
        "agent/wasted_episodes": 8 / 15,
    }
    assert episode_metrics([first], "val-aux/agent")["val-aux/agent/wasted_episodes"] == 3 / 10
    assert episode_metrics([RolloutJob(requests)]) == {}


def test_seeds_depend_on_every_part_and_leave_room_for_the_group() -> None:
    seeds = {group_seed(run, step, prompt) for run in range(4) for step in range(20) for prompt in range(20)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**30 for seed in seeds)
    assert group_seed(1, 23, 4) != group_seed(12, 3, 4)


def test_seeds_are_the_same_in_every_process() -> None:
    assert group_seed(1, 2, 3) == 436752066


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
