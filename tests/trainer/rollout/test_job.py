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
def test_what_is_told_of_failures_and_of_episodes_that_failed(score: float | None, told: str) -> None:
    for count, responses in ((3, "3 responses"), (1, "1 response")):
        (told_of,) = describe_failures(["ValueError: no"] * count, [], score)
        says(told_of, responses, f"reward.failure_score={told}", "ValueError")
    (failed,) = describe_failures([], [AgentError("loop.py: KeyError"), AgentError("later")], score)
    says(failed, "2 groups", "loop.py: KeyError")
    assert "later" not in failed
    assert list(describe_failures([], [], score)) == []


def test_a_batch_is_of_what_there_is_and_if_there_is_nothing_says_why() -> None:
    group, failed = DataProtoRef(num_rows=2), {0: AgentError("no server")}
    assert len(RolloutJob([], {1: group}, {1: group}, failed=failed).batch()) == 2
    with refuses(AgentError, "no server"):
        RolloutJob([], failed=failed).batch()


def test_failed_attempts_and_what_they_waste_are_counted() -> None:
    """Three groups of 4. Of the first an episode has failed once; the second lacks one, which has failed twice, and the
    third has ended with the second failure of another: 5 + 5 + 5 attempts, of which 1 + 2 + 5 do not train.
    """
    again, last = AgentError("again"), AgentError("last", "timeout", was_last=True)
    requests = [GroupRequest(uid, np.array([1]), SamplingSettings(4, 1.0, 1.0, -1, 8, 0), TASK) for uid in "abc"]
    first, second = RolloutJob(requests[:2]), RolloutJob(requests[2:], failed={0: last})
    first.failed_attempts |= {0: [again], 1: [again, last]}
    second.failed_attempts[0] += [again, last]
    counts = {"failures/error": 3.0, "failures/timeout": 2.0, "missing_episodes": 1.0, "dropped_groups": 1.0}
    named = {f"agent/{name}": value for name, value in (counts | {"wasted_episodes": 8 / 15}).items()}
    assert episode_metrics([first, second]) == named
    assert episode_metrics([first], "val-aux/agent")["val-aux/agent/wasted_episodes"] == 3 / 10
    assert episode_metrics([RolloutJob(requests)]) == {}


def test_seeds_depend_on_every_part_and_leave_room_for_the_group() -> None:
    seeds = {group_seed(run, step, prompt) for run in range(4) for step in range(20) for prompt in range(20)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**30 for seed in seeds)
    assert group_seed(1, 23, 4) != group_seed(12, 3, 4)
    assert group_seed(1, 2, 3) == 436752066, "the same in every process"


def scored(**columns: list[float]) -> DataProtoRef:
    """A group with these values."""
    small = {"score" if name == "score" else f"reward_extra/{name}": np.array(v) for name, v in columns.items()}
    return DataProtoRef(small=small, num_rows=len(columns["score"]))


def test_a_group_is_judged_by_the_responses_that_have_the_value_which_may_be_an_extra_one() -> None:
    nan = np.nan
    informs = {
        (1.0, nan, 0.0, 1.0): True,
        (nan, nan, 0.0, 1.0): True,
        (1.0, 1.0, 1.0, 1.0): False,
        (1.0, nan, 1.0, 1.0): False,
        (nan, nan, nan, 1.0): False,
        (nan, nan, nan, nan): False,
    }
    groups = {acc: scored(score=[1.0, 2.0, 3.0, 4.0], acc=list(acc)) for acc in informs}
    assert {acc: informative(group, "acc") for acc, group in groups.items()} == informs
    assert all(informative(group, "score") for group in groups.values())


def test_a_value_that_no_response_has_ends_the_run_and_one_that_a_group_misses_does_not() -> None:
    groups = [scored(score=[1.0, 2.0]), scored(score=[1.0, 2.0], acc=[1.0, 0.0])]
    assert [informative(group, "acc") for group in groups] == [False, True]
    require_metric(groups, "acc")
    key = "algorithm.filter_groups.metric"
    with refuses(RewardError, f"{key}=exact", "score, acc", "'exact'", f"{key}=score"):
        require_metric(groups, "exact")
    with refuses(RewardError, f"{key}=fluency", f"{key}=score"):
        run(make_sampler([MIXED, MIXED], FILTER, f"{key}=fluency").rollout(1))
