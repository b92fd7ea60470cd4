"""The pump: what flows on while something else is generated, what ends, and its time limits."""

import asyncio
import functools
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError, WorkerError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.trainer.rollout.job import RolloutJob
from grpo_dist.trainer.rollout.pump import SCORER_RESTART_S, SCORER_START_S, RolloutPump
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.rollout import GroupRequest, RolloutGroup
from grpo_dist.workers.scorer import RewardSettings, Task
from tests.messages import refuses, says
from tests.processes import spawned, start_together
from tests.trainer.fake_run import Groups
from tests.trainer.fakes import HeldRolloutWorker

N, TIMEOUT_S = 8, 30.0


class Engines:
    """Whose groups have a uid only: in turn so many rows after these failed attempts; without rows none is left."""

    def __init__(self, *failed: tuple[int, list[AgentError]]) -> None:
        self.failed = iter(failed)

    async def generate(self, request: GroupRequest, **options: Any) -> DataProtoRef:
        rows, failed = next(self.failed, (1, []))
        options["on_failed"](failed)
        if not rows:
            raise failed[-1]
        return DataProtoRef(small={"uid": np.array([request.uid] * rows)}, num_rows=rows)


class Scorer:
    """Reward processes that score nothing and note what they are asked, one group after the other."""

    def __init__(self) -> None:
        self.free, self.asked = asyncio.Lock(), list[tuple[str, Task, float]]()

    async def score(self, group: DataProtoRef, task: Task, limit_s: float) -> tuple[DataProtoRef, list[str]]:
        async with self.free:
            self.asked.append((group["uid"][0], task, limit_s))
            return group.select(()), []


def pump_of(rollout: Any, reward: Any = None, sources: Any = None, **options: Any) -> RolloutPump:
    return RolloutPump(rollout, reward or Scorer(), sources or {}, **{"reward_timeout_s": 1.0} | options)


async def finished(pump: RolloutPump, requests: list[GroupRequest], **options: Any) -> RolloutJob:
    job = pump.submit(requests, **options)
    await job.finished()
    return job


async def test_a_process_whose_function_hangs_on_every_response_may_finish() -> None:
    """Each hung scorer is killed, and started again for the next response; the first one may have to start, too."""
    reward, sampling = Scorer(), SamplingSettings(N, 1.0, 1.0, -1, 8, None)
    pump = pump_of(Engines(), reward, reward_timeout_s=TIMEOUT_S)
    await finished(pump, [GroupRequest("a", np.array([1]), sampling, Task("", "", {}))])
    assert [limit_s for *_, limit_s in reward.asked] == [N * (TIMEOUT_S + SCORER_RESTART_S) + SCORER_START_S]


async def test_episodes_that_have_used_up_their_attempts_are_counted_and_too_many_end_the_run() -> None:
    """Three episodes: 2 of a group that goes on, 1 of one that is dropped. Of 100 episodes 3 may."""
    again, last = AgentError("again"), AgentError("no server", "timeout", was_last=True)
    requests = [replace(each, sampling=replace(each.sampling, n=N)) for each in requests_for(["a", "b", "c"])]

    def make(rate: float) -> RolloutPump:
        rollout = Engines((6, [again, last, last]), (0, [again, again, last]), (8, [again] * 5))
        return pump_of(rollout, max_episode_failure_rate=rate)

    pump = make(0.03)
    job = await finished(pump, requests)
    assert (pump.num_episodes, pump.num_failed_episodes) == (3 * N, 3)
    assert ([len(group) for group in job.results()], list(job.failed)) == ([6, 8], [1])
    assert {i: len(failed) for i, failed in job.failed_attempts.items()} == {0: 3, 1: 3, 2: 5}
    key = "actor_rollout_ref.rollout.agent.max_failure_rate"
    with refuses(AgentError, f"{key}=0.029", "3 of 16", "100", "no server"):
        await finished(make(0.029), requests)


async def test_each_group_has_the_numbers_of_its_data_source_and_of_that_ones_teacher() -> None:
    """A validation row may have none, since nothing is compared with it; one of a checkpoint had another place then."""
    read: list[list[int]] = []

    async def reference(batch: DataProtoRef) -> DataProtoRef:
        read.append(batch["teacher"].tolist())
        return batch.select(())

    requests = [
        replace(each, task=replace(each.task, data_source=source), needs_log_probs=source != "other")
        for each, source in zip(requests_for(["x", "y", "z"]), ("math", "code", "other"), strict=True)
    ]
    sources = {"ref": reference}
    pump = pump_of(Engines((2, []), (1, []), (1, [])), sources=sources, teachers=["code", "math"])
    job = await finished(pump, requests, sources=sources)
    saved = replace(job.groups[0], small=job.groups[0].small | {"teacher": np.array([7, 7])})
    await finished(pump, requests[:1], sources=sources, finished={0: (saved, DataProtoRef())})
    assert sorted(read) == [[0], [1, 1], [1, 1]]
    numbers = [int(job.groups[i]["source"][0]) for i in range(3)]
    assert numbers == [zlib.crc32(source) % 2**31 for source in (b"math", b"code", b"other")]


async def test_a_cancelled_group_that_waits_to_be_scored_is_not() -> None:
    """Its job is done without it, and lets it go; the one behind it is scored."""
    reward = Scorer()
    pump = pump_of(Engines(), reward)
    async with reward.free:
        first, second = (pump.submit(requests_for([uid])) for uid in "ab")
        while not (first.groups and second.groups):
            await asyncio.sleep(0)
        first.cancel([0])
        await first.finished()
        first.release([0])
    await second.finished()
    assert (first.results(), len(second.results())) == ([], 1)
    assert [uid for uid, *_ in reward.asked] == ["b"]


async def test_a_pass_waits_for_its_share_and_leaves_out_what_was_cancelled() -> None:
    """Also a group that was cancelled before anything of it had begun."""
    passes: list[list[str]] = []

    async def source(batch: DataProtoRef) -> DataProtoRef:
        passes.append(batch["uid"].tolist())
        return batch

    pump = pump_of(Engines(), sources={"ref": source})
    job = pump.submit(requests_for("012345678"), sources=["ref"])
    job.cancel([0, 4])
    await job.finished()
    assert pump.tasks == set()
    assert sorted(passes) == [["1", "2"], ["3"], ["5", "6"], ["7", "8"]], "fixed shares: 0-2, 3-4, 5-6, 7-8"


async def scored_by_model(scores: Callable[..., Any], **options: Any) -> tuple[RolloutJob, dict[str, list[float]]]:
    """A job whose reward model is `scores`, with what the reward processes were told of each group."""
    reward = Scorer()
    pump = pump_of(Engines(), reward, model_scores=scores)
    job = await finished(pump, requests_for("012345"), **options)
    assert pump.tasks == set()
    return job, {uid: task.model_scores["rm_score"].tolist() for uid, task, _ in reward.asked}


async def test_the_reward_model_scores_fixed_shares_before_the_reward_processes() -> None:
    """Also again where some of a share came from a checkpoint: else the others of it would be computed in another pass,
    with other rounding; a finished share is not.
    """
    asked: list[list[str]] = []

    async def scores(batch: DataProtoRef, conversations: dict[str, Any]) -> dict[str, np.ndarray]:
        asked.append(batch["uid"].tolist())
        assert list(conversations) == batch["uid"].tolist()
        return {"rm_score": batch["uid"].astype(float)}

    job, told = await scored_by_model(scores)
    assert sorted(asked) == [["0", "1"], ["2", "3"], ["4"], ["5"]]
    assert told == {str(i): [i] for i in range(6)}
    assert job.timings["reward_model"] >= 0
    asked.clear()
    there = {i: (DataProtoRef(small={"uid": np.array([str(i)])}, num_rows=1), DataProtoRef()) for i in (0, 2, 3)}
    _, told = await scored_by_model(scores, finished=there)
    assert sorted(asked) == [["0", "1"], ["4"], ["5"]]
    assert set(told) == {"1", "4", "5"}


async def test_where_slow_groups_are_cancelled_each_is_scored_by_itself() -> None:
    """A cancelled group that waits for the reward model is not scored; one that is being scored ends before the job."""
    asked, free = list[str](), asyncio.Event()

    async def scores(batch: DataProtoRef, conversations: dict[str, Any]) -> dict[str, np.ndarray]:
        asked.append(batch["uid"][0])
        if asked[1:]:
            await free.wait()
        return {"rm_score": batch["uid"].astype(float)}

    job = pump_of(Engines(), model_scores=scores).submit(requests_for("0123"), cancels=True)
    await job.settled(lambda: len(asked) == 2 and bool(job.scores))
    assert set(job.scores) == {0}
    job.cancel([1, 2, 3])
    free.set()
    await job.finished()
    assert all(task.done() for task in job.passes), "nothing is left that computes during the update"
    job.release([1, 2, 3])
    assert [group["uid"].tolist() for group in job.results()] == [["0"]]
    assert asked == ["0", "1"]


async def test_a_reward_model_that_fails_ends_the_job() -> None:
    scores = AsyncMock(side_effect=WorkerError("lost", "reward_model", 0, "node", "reward_model"))
    with refuses(WorkerError, "reward_model worker 0"):
        await scored_by_model(scores)


async def test_the_background_ends_with_the_run() -> None:
    pump = pump_of(SimpleNamespace(generate=lambda *args, **options: asyncio.sleep(1000)))
    job = pump.submit(requests_for("ab"))
    await asyncio.sleep(0)
    await pump.stop()
    assert all(flow.cancelled() for flow in job.flows.values())
    assert pump.tasks == set()


# --- on processes ------------------------------------------------------------------------------------------------
def make_pump(groups: Groups, engines: WorkerGroup, most: int = 0) -> RolloutPump:
    """With the reference as the only source of log-probs."""
    reward, rollout = RewardPool(groups["reward"]), RolloutGroup(engines, RestartBudget(most))
    plan = make_plan(load_config([])[0])
    engine = SimpleNamespace(rollout=plan.config.actor_rollout_ref.rollout)
    start_together(reward.start([RewardSettings.of(plan, {})]), rollout.start([engine] * len(engines)))
    reference = functools.partial(Gang(groups["ref"]).compute_log_probs, "ref_log_prob")
    return RolloutPump(rollout, reward, {"ref": reference}, reward_timeout_s=TIMEOUT_S)


def requests_for(uids: Sequence[str]) -> list[GroupRequest]:
    sampling, task = SamplingSettings(2, 1.0, 1.0, -1, 8, None), Task("arithmetic", "1", {})
    return [GroupRequest(uid, np.array([i], np.int32), sampling, task) for i, uid in enumerate(uids)]


async def until(done: Callable[[], bool], most_s: float = 120.0) -> bool:
    """Wait for what takes moments; whether it came."""
    deadline = time.monotonic() + most_s
    while not done() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return done()


@pytest.mark.ray
def test_a_group_is_scored_and_gets_its_log_probs_while_another_is_generated(groups: Groups) -> None:
    """The slow one ends when the test says so, and not before."""

    async def scenario(engines: WorkerGroup, pump: RolloutPump) -> None:
        job = pump.submit(requests_for(["slow", "fast"]), sources=["ref"])
        assert await until(lambda: set(job.scores) == set(job.log_probs["ref"]) == {1})
        assert set(job.groups) == {1}
        assert not job.flows[0].done()
        await engines.ask(0, "test", "release")
        await job.finished()
        assert set(job.scores) == set(job.log_probs["ref"]) == {0, 1}

    with spawned("rollout", HeldRolloutWorker, [(["slow"],)]) as engines:
        run(scenario(engines, make_pump(groups, engines)))


@pytest.mark.ray
def test_cancelled_groups_are_aborted_where_they_are_generated(groups: Groups) -> None:
    """The other one in flight there goes on."""

    async def scenario(engines: WorkerGroup, pump: RolloutPump) -> None:
        job = pump.submit(requests_for(["slower", "fast", "slow"]), sources=["ref"])
        assert await until(lambda: 1 in job.scores)
        job.cancel([0, 1])
        while "aborted slower" not in await engines.ask(0, "test", "seen"):
            await asyncio.sleep(0.01)
        assert job.cancelled == {0}, "what has scores stays"
        assert not job.flows[2].done()
        await engines.ask(0, "test", "release")
        await job.finished()
        assert [group["uid"].tolist() for group in job.results()] == [["fast"] * 2, ["slow"] * 2]
        assert set(job.log_probs["ref"]) == {1, 2}
        assert pump.rollout.restarts.failures == []
        assert await until(lambda: pump.rollout.members[0].taken == 0), "the engine has room again"

    with spawned("rollout", HeldRolloutWorker, [(["slow", "slower"],)]) as engines:
        run(scenario(engines, make_pump(groups, engines)))


@pytest.mark.ray
@pytest.mark.deep
def test_an_engine_that_gives_a_group_up_again_and_again_stops_the_run(groups: Groups) -> None:
    with spawned("rollout", HeldRolloutWorker, [((), ["refused"])]) as engines:
        pump = make_pump(groups, engines, most=1)
        remedies = ("actor_rollout_ref.rollout.engine_kwargs", "VLLM_LOGGING_LEVEL=INFO")
        with refuses(WorkerError, "rollout worker 0", "group refused", *remedies) as caught:
            run(finished(pump, requests_for(["refused"])))
        (note,) = caught.value.__notes__
        says(note, "trainer.max_worker_restarts=1")
