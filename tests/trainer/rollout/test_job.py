from __future__ import annotations

from collections import Counter

import pytest

from grpo_dist.errors import AgentError
from grpo_dist.trainer.rollout.job import RolloutJob, describe_failures
from grpo_dist.workers.batch_ref import DataProtoRef
from tests.messages import refuses, says


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


def test_failures_are_counted_by_kind() -> None:
    job = RolloutJob([], failed_episodes=Counter(error=2, timeout=1))
    assert job.episode_metrics() == {"agent/failures/error": 2.0, "agent/failures/timeout": 1.0}
    assert RolloutJob([]).episode_metrics("val-aux/agent") == {}
