"""A pool on processes that are none; with real ones: tests/workers."""

import asyncio
import concurrent.futures
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from grpo_dist.errors import ConfigError, EngineError, GrpoDistError, WorkerLost
from grpo_dist.runtime import nodes
from grpo_dist.runtime.event_loop import TimeLimits, run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.pool import Pool
from tests.messages import says
from tests.runtime.fakes import FakeNodes, Held, settle

pytestmark = pytest.mark.usefixtures("impatient")


def made(size: int, most: int = 1) -> tuple[Pool, Held]:
    workers = Held("reward", size)
    return Pool(workers, RestartBudget(most, FakeNodes())), workers


def ask(pool: Pool, name: str, **options: Any) -> asyncio.Task[Any]:
    def send(rank: int) -> Any:
        return pool.workers.submit(rank, "score", name)

    return asyncio.create_task(pool.ask(send, lambda call, answer: answer, **options))


def ask_now(pool: Pool) -> asyncio.Task[Any]:
    send = pool.workers.submit
    return asyncio.create_task(pool.ask_now(lambda rank: send(rank, "write", "now"), lambda call, answer: answer))


async def answer(workers: Held, *names: str) -> None:
    """Each of these calls, which is open, is answered with its name."""
    for name in names:
        workers.open(name)[0][1].set_result(name)
        await settle()


async def lose(workers: Held, *names: str) -> None:
    """Of each open call the worker is lost."""
    for name in names:
        rank, answer = workers.open(name)[0]
        answer.set_exception(WorkerLost("gone", "reward", rank))
    await settle()


async def starting(workers: Held) -> tuple[int, asyncio.Future[Any]]:
    """Wait until a new process is to start."""
    while not workers.open("start"):
        await asyncio.sleep(0)
    (found,) = workers.open("start")
    return found


async def test_what_was_asked_of_a_lost_worker_comes_before_what_waits() -> None:
    pool, workers = made(1)
    tasks = [ask(pool, "first"), ask(pool, "second"), ask(pool, "urgent", first=True)]
    await settle()
    await lose(workers, "first")
    assert [method for method, _ in workers.order] == ["first", "respawn", "start"], "it starts, and has no room"
    await answer(workers, "start")
    for name in ("urgent", "first", "second"):
        assert [each for each in ("urgent", "first", "second") if workers.open(each)] == [name]
        await answer(workers, name)
    assert await asyncio.gather(*tasks) == ["first", "second", "urgent"]
    assert pool.restarts.failures == [str(WorkerLost("gone", "reward", 0))]


async def test_a_caller_that_is_cancelled_just_as_it_is_sent_is_given_up() -> None:
    pool, workers = made(1)
    given_up: list[str] = []
    first = ask(pool, "first")
    second = ask(pool, "second", give_up=lambda call: given_up.append(call.ref))
    await settle()
    workers.open("first")[0][1].set_result(1)
    while not workers.open("second"):
        await asyncio.sleep(0)
    second.cancel()
    await settle()
    assert (first.result(), second.cancelled(), given_up) == (1, True, ["second"])
    assert pool.members[0].taken == 1, "until it answers"
    await answer(workers, "second")
    assert pool.members[0].taken == 0


async def test_workers_that_are_lost_in_one_look_are_replaced_once_each() -> None:
    pool, workers = made(2, most=2)
    tasks = [ask(pool, "a"), ask(pool, "b"), ask_now(pool)]
    await settle()
    await lose(workers, "a", "b", "now")
    assert workers.lives == [1, 1]
    await answer(workers, "start", "start", "a", "b", "now")
    assert await asyncio.gather(*tasks) == ["a", "b", "now"]


async def test_when_the_budget_is_spent_nobody_waits_for_ever() -> None:
    pool, workers = made(2, most=0)
    tasks = [ask(pool, name) for name in "abc"]
    await settle()
    await lose(workers, "a")
    for task in (tasks[0], tasks[2], ask(pool, "later")):
        with pytest.raises(WorkerLost):
            await task
    await answer(workers, "b")
    assert await tasks[1] == "b", "it was sent before"


async def failing(*outcomes: GrpoDistError | str) -> tuple[list[str], list[str], str]:
    """A pool whose only worker raises or answers in turn: its failures, the answers, and the error of its end."""
    pool, workers = made(1, most=3)
    pool.replaces = (EngineError, WorkerLost)
    asked = [ask(pool, "score") for _ in outcomes]
    for outcome in outcomes:
        await settle()
        [(_, score)] = workers.open("score")
        score.set_result(outcome) if isinstance(outcome, str) else score.set_exception(outcome)
        await settle()
        await answer(workers, *["start" for _ in workers.open("start")])
    ended = [task for task in asked if task.done()]
    raised = [error for task in ended if (error := task.exception()) is not None]
    answered = [task.result() for task in ended if task.exception() is None]
    told = f"{raised[0]}\n{raised[0].__notes__}" if raised else ""
    for task in asked:
        task.cancel()
    return pool.restarts.failures, answered, told


async def test_what_repeats_itself_exactly_is_not_tried_again() -> None:
    """Once is: an engine that has failed may be whole again. What was answered in between says that it was."""
    unsupported, other = EngineError("vLLM failed: RuntimeError: head_dim=16"), EngineError("vLLM failed: another")
    failures, answered, told = await failing(unsupported, unsupported)
    assert (failures, answered) == ([str(unsupported)], [])
    says(told, "head_dim=16", "trainer.max_worker_restarts=3")
    lost = WorkerLost("killed", "reward", 0)  # by whom it may be
    for outcomes in ([unsupported, other, unsupported], [unsupported, "answered", unsupported], [lost, lost, lost]):
        errors = [str(each) for each in outcomes if each != "answered"]
        assert await failing(*outcomes) == (errors, [each for each in outcomes if each == "answered"], "")


async def test_a_mistake_that_shows_in_a_restart_is_told_to_all() -> None:
    pool, workers = made(1)
    task = ask(pool, "a")
    await settle()
    await lose(workers, "a")
    workers.open("start")[0][1].set_exception(ConfigError("reward.path"))
    for told in (task, pool.started()):
        with pytest.raises(ConfigError, match=r"reward\.path"):
            await told


def test_who_waits_for_a_process_that_is_replaced_or_ended_need_not_wait_for_ray(monkeypatch: Any) -> None:
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


# --- machines ------------------------------
async def test_a_lost_machine_is_one_fault_and_those_left_take_the_work_until_there_is_room() -> None:
    """Ranks 0 and 1 were on it. Room comes for one of them, which then takes part."""
    pool, workers = made(3, most=1)
    there = pool.restarts.nodes
    there.lost, there.full = {"node0": "host0 (10.0.0.1)"}, set(workers.bundles[:2])
    tasks = [ask(pool, name) for name in "abc"]
    await settle()
    await lose(workers, "a", "b")
    assert (workers.present, workers.open("start")) == ([2], [])
    await pool.started()  # nothing is starting
    await answer(workers, "c", "a")
    assert workers.order[-1] == ("b", 2)
    there.full.remove(workers.bundles[1])
    assert (await starting(workers))[0] == 1
    await answer(workers, "start")
    tasks.append(ask(pool, "later"))
    await settle()
    assert workers.order[-1] == ("later", 1)
    await answer(workers, "later", "b")
    assert await asyncio.gather(*tasks) == ["a", "b", "c", "later"]
    assert len(pool.restarts.failures) == 2
    assert all("host0 (10.0.0.1)" in failure for failure in pool.restarts.failures)


def with_an_extra(pool: Pool, workers: Held) -> FakeNodes:
    workers.bundles[-1] = dataclasses.replace(workers.bundles[-1], required=False)
    return pool.restarts.nodes


async def test_one_that_is_not_required_waits_for_another_machine_and_costs_nothing() -> None:
    pool, workers = made(3, most=0)
    there = with_an_extra(pool, workers)
    there.lost, there.full = {"node1": "host1 (10.0.0.2)"}, set(workers.bundles[2:])
    tasks = [ask(pool, name) for name in "abc"]
    await settle()
    await lose(workers, "c")
    assert (workers.present, pool.num_ready, pool.restarts.machines_lost) == ([0, 1], 2, 1)
    there.lost, there.full = {}, set()
    await starting(workers)
    await answer(workers, "start")
    assert (pool.num_ready, pool.restarts.failures) == (3, [])
    await answer(workers, *"abc")
    assert await asyncio.gather(*tasks) == ["a", "b", "c"]


@pytest.mark.parametrize("error", [WorkerLost("gone", "reward", 2), GrpoDistError("model.path=mine")])
async def test_one_that_is_not_required_and_fails_is_left_out(error: GrpoDistError) -> None:
    """As it works, and as it starts on a machine that came for it."""
    pool, workers = made(3, most=0)
    there, names = with_an_extra(pool, workers), ("first", "second", "third")
    tasks = []
    if isinstance(error, WorkerLost):
        tasks = [ask(pool, name) for name in names]
        await settle()
        await lose(workers, "third")
    else:
        workers.retire(2)
        pool._wait_for_room(2)
        (await starting(workers))[1].set_exception(error)
    while not there.left:
        await asyncio.sleep(0)
    assert (workers.present, there.left, pool.restarts.failures) == ([0, 1], [workers.bundles[2]], [])
    says(there.told[-1], "reward worker 2", str(error))
    await answer(workers, *names[: len(tasks)])
    assert await asyncio.gather(*tasks) == list(names[: len(tasks)])
    await pool.started()


async def test_those_that_are_not_required_give_way() -> None:
    """Also one that still waits for room itself, which then no longer does."""
    pool, workers = made(4, most=0)
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
    assert (workers.present, pool.num_ready, there.left) == ([0, 1], 2, workers.bundles[2:])
    assert workers.open("start") == []


async def test_with_no_worker_left_there_is_a_limit_to_the_wait_for_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what is asked at once, without the queue."""
    monkeypatch.setattr(nodes, "RESCHEDULED_S", 0.01)
    pool, workers = made(2, most=1)
    there = pool.restarts.nodes
    there.lost, there.full = {"node0": "host0 (10.0.0.1)"}, set(workers.bundles)
    tasks = [ask(pool, "a"), ask(pool, "b"), ask_now(pool)]
    await settle()
    await lose(workers, "a", "b")
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert workers.lives == [0, 0]
    for error in found:
        assert isinstance(error, GrpoDistError)
        says(error, "host0 (10.0.0.1)", "trainer.node_wait_minutes=0", "reward 1 x (1 CPU, 0 GPU)", "ray start")
    assert len(there.told) == 2
