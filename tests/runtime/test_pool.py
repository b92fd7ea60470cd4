"""A pool on processes that are none; with real ones: tests/workers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from grpo_dist.errors import ConfigError, EngineError, GrpoDistError, WorkerLost
from grpo_dist.runtime import nodes
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import TimeLimits, blocking, run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.pool import Pool
from grpo_dist.runtime.resources import Bundle
from tests.messages import says
from tests.runtime.fake_nodes import FakeNodes


class Fakes(WorkerGroup):
    """Processes that answer when they are told to, with the number of their life, or are lost."""

    def __init__(self, size: int) -> None:
        bundles = [Bundle(1.0, 0.0, rank, 0) for rank in range(size)]
        super().__init__("reward", [f"{rank}-0" for rank in range(size)], TimeLimits(60.0), bundles=bundles)
        self.answers: list[tuple[Call, asyncio.Future[Any]]] = []
        self.lives = [0] * size

    def submit(self, rank: int, stage: str, method: str, *args: Any) -> Call:
        call = Call(method, self, rank, stage, time.monotonic(), 60.0, self.handles[rank])  # type: ignore[arg-type]
        self.answers.append((call, asyncio.get_running_loop().create_future()))
        return call

    async def value(self, call: Call) -> Any:
        return await next(answer for each, answer in self.answers if each is call)

    def retire(self, rank: int) -> None:
        for call, answer in self.answers:
            if call.rank == rank and call.is_current and not answer.done():
                answer.set_exception(self.lost(rank, call.stage, "its process was replaced"))
        self.handles[rank] = None

    def node_id(self, rank: int) -> str:
        return f"node{rank // 2}"

    def respawn(self, rank: int) -> None:
        self.lives[rank] += 1
        self.handles[rank] = f"{rank}-{self.lives[rank]}"

    def open(self, method: str) -> list[tuple[int, asyncio.Future[Any]]]:
        return [(call.rank, answer) for call, answer in self.answers if call.ref == method and not answer.done()]


def scenario(size: int, most: int = 1) -> Callable[[Callable[[Pool, Fakes], Any]], None]:
    """Run a test's coroutine on a pool of so many fakes."""

    def decorate(test: Callable[[Pool, Fakes], Any]) -> None:
        workers = Fakes(size)
        blocking(test)(Pool(workers, RestartBudget(most, FakeNodes())), workers)

    return decorate


def ask(pool: Pool, name: str, **options: Any) -> asyncio.Task[Any]:
    def send(rank: int) -> Call:
        return pool.workers.submit(rank, "score", name)

    return asyncio.create_task(pool.ask(send, lambda call, answer: answer, **options))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_was_asked_of_a_lost_worker_comes_before_what_waits() -> None:
    @scenario(1)
    async def _(pool: Pool, workers: Fakes) -> None:
        first, second, urgent = ask(pool, "first"), ask(pool, "second"), ask(pool, "urgent", first=True)
        await settle()
        [(_, answer)] = workers.open("first")
        answer.set_exception(WorkerLost("gone", "reward", 0))
        await settle()
        assert [call.ref for call, _ in workers.answers] == ["first", "start"], "it starts, and has no room"
        workers.open("start")[0][1].set_result(None)
        for name in ("urgent", "first", "second"):
            await settle()
            [(_, answer)] = workers.open(name)
            assert not [each for each in ("urgent", "first", "second") if each != name and workers.open(each)]
            answer.set_result(name)
        assert await asyncio.gather(first, second, urgent) == ["first", "second", "urgent"]
        assert pool.restarts.failures == [str(WorkerLost("gone", "reward", 0))]


def test_a_caller_that_is_cancelled_just_as_it_is_sent_is_given_up() -> None:
    """It has a worker and does not know yet."""

    @scenario(1)
    async def _(pool: Pool, workers: Fakes) -> None:
        given_up: list[str] = []
        first = ask(pool, "first")
        second = ask(pool, "second", give_up=lambda call: given_up.append(str(call.ref)))
        await settle()
        workers.open("first")[0][1].set_result(1)
        while not workers.open("second"):
            await asyncio.sleep(0)
        second.cancel()
        await settle()
        assert (first.result(), second.cancelled(), given_up) == (1, True, ["second"])
        assert pool.members[0].taken == 1, "until it answers"
        workers.open("second")[0][1].set_result(2)
        await settle()
        assert pool.members[0].taken == 0


def test_workers_that_are_lost_in_one_look_are_replaced_once_each() -> None:
    @scenario(2, most=2)
    async def _(pool: Pool, workers: Fakes) -> None:
        tasks = [ask(pool, name) for name in "ab"]
        now = asyncio.create_task(
            pool.ask_now(lambda rank: workers.submit(rank, "write", "now"), lambda _, answer: answer)
        )
        await settle()
        for name in ("a", "b", "now"):
            rank, answer = workers.open(name)[0]
            answer.set_exception(WorkerLost("gone", "reward", rank))
        await settle()
        assert workers.lives == [1, 1]
        for _, answer in workers.open("start"):
            answer.set_result(None)
        await settle()
        for name in ("a", "b", "now"):
            workers.open(name)[0][1].set_result(name)
        assert await asyncio.gather(*tasks, now) == ["a", "b", "now"]


def test_when_the_budget_is_spent_nobody_waits_for_ever() -> None:
    @scenario(2, most=0)
    async def _(pool: Pool, workers: Fakes) -> None:
        tasks = [ask(pool, name) for name in "abc"]
        await settle()
        workers.open("a")[0][1].set_exception(WorkerLost("gone", "reward", 0))
        await settle()
        for task in (tasks[0], tasks[2], ask(pool, "later")):
            with pytest.raises(WorkerLost):
                await task
        workers.open("b")[0][1].set_result("b")
        assert await tasks[1] == "b", "it was sent before"


def failing(*errors: GrpoDistError | str) -> tuple[list[str], list[str], str]:
    """A pool whose only worker raises or answers in turn: its failures, the answers, and the error of its end."""
    found: list[Any] = []

    @scenario(1, most=3)
    async def _(pool: Pool, workers: Fakes) -> None:
        pool.replaces = (EngineError, WorkerLost)
        asked = [ask(pool, "score") for _ in errors]
        for outcome in errors:
            await settle()
            for _, started in workers.open("start"):
                started.set_result(None)
            await settle()
            [(_, answer)] = workers.open("score")
            if isinstance(outcome, str):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)
        await settle()
        for _, started in workers.open("start"):
            started.set_result(None)
        await settle()
        ended = [task.exception() for task in asked if task.done()]
        told = next((f"{error}\n{error.__notes__}" for error in ended if error is not None), "")
        answered = [task.result() for task in asked if task.done() and task.exception() is None]
        found.extend((pool.restarts.failures, answered, told))
        for task in asked:
            task.cancel()

    return found[0], found[1], found[2]


def test_what_repeats_itself_exactly_is_not_tried_again() -> None:
    """Once is: an engine that has failed may be whole again. What was answered in between says that it was."""
    unsupported, other = "vLLM failed: RuntimeError: head_dim=16", "vLLM failed: RuntimeError: another"
    failures, answered, told = failing(EngineError(unsupported), EngineError(unsupported))
    assert (failures, answered) == ([unsupported], [])
    says(told, "head_dim=16", "trainer.max_worker_restarts=3")

    differ = [EngineError(unsupported), EngineError(other), EngineError(unsupported)]
    assert failing(*differ) == ([unsupported, other, unsupported], [], "")
    between = [EngineError(unsupported), "answered", EngineError(unsupported)]
    assert failing(*between) == ([unsupported, unsupported], ["answered"], "")
    lost = [WorkerLost("killed", "reward", 0) for _ in range(3)]
    assert failing(*lost) == ([str(lost[0])] * 3, [], ""), "somebody else may have killed it"


def test_a_mistake_that_shows_in_a_restart_is_told_to_all() -> None:
    @scenario(1)
    async def _(pool: Pool, workers: Fakes) -> None:
        task = ask(pool, "a")
        await settle()
        workers.open("a")[0][1].set_exception(WorkerLost("gone", "reward", 0))
        await settle()
        workers.open("start")[0][1].set_exception(ConfigError("reward.path"))
        with pytest.raises(ConfigError, match=r"reward\.path"):
            await task
        with pytest.raises(ConfigError, match=r"reward\.path"):
            await pool.started()


def test_who_waits_for_a_process_that_is_replaced_or_ended_need_not_wait_for_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that is gone is found out by Ray much later. Nobody waits for a role that has ended."""
    never = SimpleNamespace(remote=lambda *args: SimpleNamespace(future=concurrent.futures.Future))
    handle = SimpleNamespace(work=never, address=never)

    async def waiting(ends: bool) -> list[Any]:
        workers = WorkerGroup("rollout", [handle], TimeLimits(240.0), [lambda: handle])
        answers = [asyncio.create_task(workers.submit(0, "generate", "work").answer()) for _ in range(2)]
        await asyncio.sleep(0)
        await workers.end() if ends else workers.respawn(0)
        return await asyncio.gather(*answers, return_exceptions=True)

    monkeypatch.setattr(ray, "kill", lambda handle: None)
    lost, ended = run(waiting(False)), run(waiting(True))
    assert [(type(each), each.rank) for each in lost] == [(WorkerLost, 0)] * 2
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2


def lose(workers: Fakes, *names: str) -> None:
    """Of each open call the worker is lost."""
    for name in names:
        rank, answer = workers.open(name)[0]
        answer.set_exception(WorkerLost("gone", "reward", rank))


def nodes_of(pool: Pool) -> FakeNodes:
    assert isinstance(pool.restarts.nodes, FakeNodes)
    return pool.restarts.nodes


def test_a_lost_machine_is_one_fault_and_those_left_take_the_work_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 were on it. Room comes for one of them, which then takes part."""
    monkeypatch.setattr(nodes, "POLL_S", 0.0)

    @scenario(3, most=1)
    async def _(pool: Pool, workers: Fakes) -> None:
        there = nodes_of(pool)
        there.lost, there.full = {"node0": "host0 (10.0.0.1)"}, set(workers.bundles[:2])
        tasks = [ask(pool, name) for name in "abc"]
        await settle()
        lose(workers, "a", "b")
        await settle()
        assert (workers.present, workers.open("start")) == ([2], [])
        await pool.started()  # nothing is starting
        workers.open("c")[0][1].set_result("c")
        for name in "ab":
            await settle()
            [(rank, answer)] = workers.open(name)
            assert rank == 2
            if name == "a":
                answer.set_result("a")
        there.full.remove(workers.bundles[1])
        while not workers.open("start"):
            await asyncio.sleep(0)
        assert [rank for rank, _ in workers.open("start")] == [1]
        workers.open("start")[0][1].set_result(None)
        await settle()
        later = ask(pool, "later")
        await settle()
        [(rank, answer)] = workers.open("later")
        assert rank == 1
        answer.set_result("later")
        workers.open("b")[0][1].set_result("b")
        assert await asyncio.gather(*tasks, later) == ["a", "b", "c", "later"]
        assert len(pool.restarts.failures) == 2
        assert all("host0 (10.0.0.1)" in failure for failure in pool.restarts.failures)


def with_an_extra(pool: Pool, workers: Fakes) -> FakeNodes:
    """The last worker is not required."""
    workers.bundles[-1] = dataclasses.replace(workers.bundles[-1], required=False)
    return nodes_of(pool)


def test_one_that_is_not_required_waits_for_another_machine_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PATIENT_POLL_S", 0.0)

    @scenario(3, most=0)
    async def _(pool: Pool, workers: Fakes) -> None:
        there = with_an_extra(pool, workers)
        there.lost, there.full = {"node1": "host1 (10.0.0.2)"}, set(workers.bundles[2:])
        tasks = [ask(pool, name) for name in "abc"]
        await settle()
        lose(workers, "c")
        await settle()
        assert (workers.present, pool.num_ready, pool.restarts.machines_lost) == ([0, 1], 2, 1)
        there.full.clear()
        there.lost = {}
        while not workers.open("start"):
            await asyncio.sleep(0)
        workers.open("start")[0][1].set_result(None)
        await settle()
        assert (pool.num_ready, pool.restarts.failures) == (3, [])
        for name in "abc":
            workers.open(name)[0][1].set_result(name)
            await settle()
        assert await asyncio.gather(*tasks) == ["a", "b", "c"]


@pytest.mark.parametrize("error", [WorkerLost("gone", "reward", 2), GrpoDistError("model.path=mine")])
def test_one_that_is_not_required_and_fails_is_left_out(error: GrpoDistError, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it works, and as it starts on a machine that came for it."""
    monkeypatch.setattr(nodes, "PATIENT_POLL_S", 0.0)

    @scenario(3, most=0)
    async def _(pool: Pool, workers: Fakes) -> None:
        there = with_an_extra(pool, workers)
        if isinstance(error, WorkerLost):
            task = ask(pool, "first"), ask(pool, "second"), ask(pool, "third")
            await settle()
            lose(workers, "third")
        else:
            workers.retire(2)
            task = ()
            pool._wait_for_room(2)
            while not workers.open("start"):
                await asyncio.sleep(0)
            workers.open("start")[0][1].set_exception(error)
        while not there.left:
            await asyncio.sleep(0)
        assert (workers.present, there.left, pool.restarts.failures) == ([0, 1], [workers.bundles[2]], [])
        says(there.told[-1], "reward worker 2", str(error))
        for name in ("first", "second", "third")[: len(task)]:
            workers.open(name)[0][1].set_result(name)
            await settle()
        assert await asyncio.gather(*task) == ["first", "second", "third"][: len(task)]
        await pool.started()


def test_those_that_are_not_required_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that still waits for room itself, which then no longer does."""
    monkeypatch.setattr(nodes, "PATIENT_POLL_S", 0.0)

    @scenario(4, most=0)
    async def _(pool: Pool, workers: Fakes) -> None:
        workers.bundles[2] = dataclasses.replace(workers.bundles[2], required=False)
        there = with_an_extra(pool, workers)
        there.full = {workers.bundles[3]}
        workers.retire(3)
        pool._take_out(3)
        pool._wait_for_room(3)
        (give_way,) = there.give_way
        give_way()
        give_way()
        there.full.clear()
        await settle()
        assert (workers.present, pool.num_ready) == ([0, 1], 2)
        assert there.left == workers.bundles[2:]
        assert workers.open("start") == []


def test_with_no_worker_left_there_is_a_limit_to_the_wait_for_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what is asked at once, without the queue."""
    monkeypatch.setattr(nodes, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "RESCHEDULED_S", 0.01)

    @scenario(2, most=1)
    async def _(pool: Pool, workers: Fakes) -> None:
        there = nodes_of(pool)
        there.lost, there.full = {"node0": "host0 (10.0.0.1)"}, set(workers.bundles)
        now = asyncio.create_task(
            pool.ask_now(lambda rank: workers.submit(rank, "write", "now"), lambda _, answer: answer)
        )
        tasks = [ask(pool, name) for name in "ab"]
        await settle()
        lose(workers, "a", "b")
        found = await asyncio.gather(*tasks, now, return_exceptions=True)
        assert workers.lives == [0, 0]
        for error in found:
            assert isinstance(error, GrpoDistError)
            says(error, "host0 (10.0.0.1)", "trainer.node_wait_minutes=0", "reward 1 x (1 CPU, 0 GPU)", "ray start")
        assert len(there.told) == 2
