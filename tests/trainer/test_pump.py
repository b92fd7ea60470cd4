"""The pump: what flows on while something else is generated, what ends, and its time limits.

Every rollout in test_trainer.py and test_staleness.py goes through it too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_dist.config.load import load_config
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import WorkerError, WorkerLost
from grpo_dist.trainer.build import reward_settings
from grpo_dist.trainer.log_prob_passes import Giver
from grpo_dist.trainer.pump import SCORER_RESTART_S, SCORER_START_S, RolloutPump
from grpo_dist.trainer.rollout_job import GroupRequest, RolloutJob
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import Task
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout_group import RolloutGroup
from tests.processes import spawned
from tests.trainer.fakes import HeldRolloutWorker

N, TIMEOUT_S = 8, 30.0
# A function that hangs on every response of a group: each is killed, and the scorer started again for the next.
HANGS_ON_ALL_S = N * (TIMEOUT_S + SCORER_RESTART_S) + SCORER_START_S


class Late:
    """A group of workers that knows of one thing only."""

    def late(self, calls: list[Call], limit_s: float) -> WorkerLost:
        return WorkerLost("late")


@pytest.mark.parametrize(("seconds", "is_replaced"), [(HANGS_ON_ALL_S - 5, False), (HANGS_ON_ALL_S + 5, True)])
def test_a_process_whose_function_hangs_on_every_response_may_finish(seconds: float, is_replaced: bool) -> None:
    replaced = []
    rollout = SimpleNamespace(check_deadlines=lambda: None, take_lost=list)
    reward = SimpleNamespace(starting=[], replace=lambda call, error: replaced.append(call))
    pump = RolloutPump(rollout, reward, {}, reward_timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    request = GroupRequest("a", np.array([1]), SamplingSettings(N, 1.0, 1.0, -1, 8, None), Task("", "", {}))
    call = Call("ref", Late(), 0, "score", time.monotonic() - seconds)  # type: ignore[arg-type]
    pump._scoring[call] = RolloutJob([request], {}), 0
    pump._check_deadlines()
    assert bool(replaced) == is_replaced
    assert (call in pump._scoring) != is_replaced


def test_a_cancelled_group_that_waits_to_be_scored_is_not() -> None:
    """Its job was done without it, and has let it go; the one behind it is scored."""
    asked: list[np.ndarray] = []
    rollout = SimpleNamespace(has_room=False, abort=lambda calls: None)
    reward = SimpleNamespace(has_free=False)
    reward.submit = lambda group, task: asked.append(group["uid"]) or len(asked)
    pump = RolloutPump(rollout, reward, {}, reward_timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    jobs = [RolloutJob(requests_for([uid]), {}) for uid in "ab"]
    for job, uid in zip(jobs, "ab", strict=True):
        job.groups[0] = DataProtoRef(small={"uid": np.array([uid])}, num_rows=1)
        pump._to_score.append((job, 0))
    pump.cancel(jobs[0], [0])
    jobs[0].release([0])
    assert [job.done for job in jobs] == [True, False]
    reward.has_free = True
    pump._dispatch()
    assert asked == ["b"]
    assert list(pump._scoring.values()) == [(jobs[1], 0)]


# --- on processes ------------------------------------------------------------------------------------------------
def make_pump(groups: dict[str, WorkerGroup], engines: WorkerGroup, most: int = 0) -> RolloutPump:
    """With the reference as the only giver of log-probs."""
    reward = RewardPool(groups["reward"])
    groups["reward"].gather(reward.submit_start(reward_settings(load_config([])[0])))
    rollout = RolloutGroup(engines, RestartBudget(most))
    engines.gather(rollout.submit_start([None] * len(engines)))
    reference = Giver(functools.partial(Gang(groups["ref"]).submit_log_probs, "ref_log_prob"))
    return RolloutPump(rollout, reward, {"ref": reference}, reward_timeout_s=TIMEOUT_S)


def requests_for(uids: Sequence[str]) -> list[GroupRequest]:
    sampling, task = SamplingSettings(2, 1.0, 1.0, -1, 8, None), Task("arithmetic", "1", {})
    return [GroupRequest(uid, np.array([i], np.int32), sampling, task) for i, uid in enumerate(uids)]


def wait(pump: RolloutPump, done: Callable[[], bool], most_s: float = 120.0) -> bool:
    """Wait for what takes moments; whether it came."""
    deadline = time.monotonic() + most_s
    pump.wait(lambda: done() or time.monotonic() > deadline)
    return done()


@pytest.mark.ray
def test_a_group_is_scored_and_gets_its_log_probs_while_another_is_generated(groups: dict[str, WorkerGroup]) -> None:
    """The slow one ends when the test says so, and not before."""
    with spawned("rollout", HeldRolloutWorker, [(["slow"],)]) as engines:
        pump = make_pump(groups, engines)
        job = pump.submit(requests_for(["slow", "fast"]), givers=["ref"])
        assert wait(pump, lambda: set(job.scores) == set(job.log_probs["ref"]) == {1})
        assert (set(job.groups), job.done) == ({1}, False)
        engines.call(0, "test", "release")
        assert wait(pump, lambda: job.done)
        assert set(job.scores) == set(job.log_probs["ref"]) == {0, 1}


@pytest.mark.ray
def test_cancelled_groups_are_aborted_where_they_are_generated(groups: dict[str, WorkerGroup]) -> None:
    """The other one in flight there goes on."""
    with spawned("rollout", HeldRolloutWorker, [(["slow", "slower"],)]) as engines:
        pump = make_pump(groups, engines)
        job = pump.submit(requests_for(["slower", "fast", "slow"]), givers=["ref"])
        assert wait(pump, lambda: 1 in job.scores)
        pump.cancel(job, [0, 1])
        assert wait(pump, lambda: "aborted slower" in engines.call(0, "test", "seen"))
        assert (job.cancelled, job.done) == ({0}, False), "what has scores stays"
        engines.call(0, "test", "release")
        assert wait(pump, lambda: job.done and not pump.in_flight)
        assert [group["uid"].tolist() for group in job.results()] == [["fast"] * 2, ["slow"] * 2]
        assert set(job.log_probs["ref"]) == {1, 2}
        assert pump.rollout.restarts.failures == []


@pytest.mark.ray
def test_an_engine_that_gives_a_group_up_again_and_again_stops_the_run(groups: dict[str, WorkerGroup]) -> None:
    with spawned("rollout", HeldRolloutWorker, [((), ["refused"])]) as engines:
        pump = make_pump(groups, engines, most=1)
        job = pump.submit(requests_for(["refused"]))
        with pytest.raises(WorkerError, match=r"rollout worker 0 on .*gave up the group refused by itself") as caught:
            wait(pump, lambda: job.done)
        assert caught.value.__notes__ == ["trainer.max_worker_restarts=1 workers were replaced before"]
        assert "engine_kwargs" in str(caught.value)


@pytest.mark.ray
def test_what_one_engine_gives_up_another_one_generates(groups: dict[str, WorkerGroup]) -> None:
    uids = ["a", "b", "c", "d"]
    with spawned("rollout", HeldRolloutWorker, [((), ["a"]), ()]) as engines:
        pump = make_pump(groups, engines, most=1)
        job = pump.submit(requests_for(uids))
        assert wait(pump, lambda: job.done)
        assert [group["uid"].tolist() for group in job.results()] == [[uid] * 2 for uid in uids]
        assert len(pump.rollout.restarts.failures) == 1
        assert engines.call(1, "test", "seen").count("asked a") == 1
