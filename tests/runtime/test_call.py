"""Calls of a group whose processes are none, and the driver's loop; test_group.py has calls of real processes."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_dist.errors import WorkerError, WorkerLost
from grpo_dist.runtime import call as module
from grpo_dist.runtime import group as module_of_groups
from grpo_dist.runtime.call import BusyClock
from grpo_dist.runtime.event_loop import TimeLimits, blocking, run
from grpo_dist.runtime.group import WorkerGroup
from tests.messages import refuses, says
from tests.ranks import run_ranks
from tests.runtime.fakes import Fakes, Held


def group(*handles: Any) -> WorkerGroup:
    return WorkerGroup("actor", handles, TimeLimits(60.0))


def working(*answers: Future[Any]) -> Any:
    """As one of Ray's actor handles: its calls have these answers in turn, and their arguments as data."""
    left = iter(answers)

    def remote(*args: Any) -> Any:
        answer = next(left)
        return SimpleNamespace(future=lambda: answer)

    def options(num_returns: int) -> Any:
        return SimpleNamespace(remote=lambda *args: (remote(*args), args))

    return SimpleNamespace(work=SimpleNamespace(remote=remote, options=options))


async def test_a_call_has_the_answer_and_the_data_of_its_process() -> None:
    answers = [Future[Any](), Future[Any]()]
    workers = group(working(answers[0]), working(answers[1]))
    call, other = workers.submit_for_data(0, "update", "work", "rows"), workers.submit(1, "memory", "work")
    for answer in answers:
        answer.set_result(answers.index(answer))
    assert (await other.answer(), await call.answer(), call.data) == (1, 0, ("rows",))
    assert call.is_current
    workers.handles[0] = working()
    assert not call.is_current, "it was replaced"


async def test_a_rank_without_a_process_is_lost() -> None:
    with refuses(WorkerLost, "actor"):
        await group(None).submit(0, "update", "update").answer()


async def test_a_wait_that_is_cancelled_leaves_the_call() -> None:
    answer = Future[int]()
    call = group(working(answer)).submit(0, "slow", "work")
    first = asyncio.create_task(call.answer())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    answer.set_result(1)
    assert await call.answer() == 1


async def test_open_calls_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from 1 to 4 and from 3 to 6, on top of 10 s before: 5 s more; then idle, then busy again from 8 on."""
    now = [1.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    answers = [Future[int](), Future[int](), Future[int]()]
    workers = group(working(*answers))
    workers._busy[0] = BusyClock(10.0)
    first = workers.submit(0, "work", "work")
    now[0] = 3.0
    second = workers.submit(0, "work", "work")
    now[0] = 4.0
    answers[0].set_result(1)
    await first.answer()
    assert workers.busy_seconds() == 13.0
    now[0] = 6.0
    answers[1].set_result(1)
    await second.answer()
    now[0] = 8.0
    assert workers.busy_seconds() == 15.0
    workers.submit(0, "work", "work")
    now[0] = 8.5
    assert workers.busy_seconds() == 15.5


async def test_an_answer_that_nobody_holds_is_gone_at_once() -> None:
    """Not only when Python looks for cycles: what it refers to in the object store, such as weights, stays with it."""

    class Weights:
        pass

    pending: list[Future[Any]] = [Future()]
    remote = SimpleNamespace(remote=lambda: SimpleNamespace(future=pending.pop))
    asyncio.get_running_loop().call_later(0.01, pending[0].set_result, Weights())
    gc.disable()
    try:
        answer = weakref.ref(await group(SimpleNamespace(update=remote)).ask(0, "update", "update"))
        await asyncio.sleep(0.05)  # callbacks of the answer, which hold it, may still run
        assert answer() is None
    finally:
        gc.enable()


# --- a rank that is late, or that others wait for ------------------------------------------------------------------
async def test_no_answer_in_time() -> None:
    """The rank that is late is named; of a call that is awaited alone the time counts from when it was sent."""
    workers, other = Held("actor", 2), Fakes("ref", 1)
    workers.limits = TimeLimits(0.04, {"patient": 60.0})
    late, answered = workers.submit(0, "add", "add", 1), workers.submit(1, "add", "add", 1)
    workers.open("add")[1][1].set_result(1)
    with refuses(WorkerLost, "actor worker 0", "host0", "'add'", "0.04 s"):
        await workers.answers([late, answered])
    call = workers.submit(1, "patient", "wait")
    assert call.limit_s == 60.0
    with refuses(WorkerLost, "actor worker 1", "host0", "'patient'", "0.02 s"):
        await other.answers([call], timeout_s=0.02)
    with refuses(WorkerLost, "actor worker 1", "host0", "'patient'", "60 s"):
        await replace(call, started=call.started - 60.0).answer()


def wait_in_vain(rank: int) -> str:
    """What gloo says at rank 0, which waits for another one."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["told"])
        return ""
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=200), dist.group.WORLD)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.zeros(1))
    store.set("told", "")
    return str(caught.value)


async def test_the_rank_that_others_wait_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those whose collective operation fails for it; nor one that works, where another fails by itself."""
    monkeypatch.setattr(module_of_groups, "COLLECTIVE_GRACE_S", 0.02)
    said, _ = run_ranks(2, wait_in_vain)
    workers = Held("actor", 3)
    for text, kind, named in ((said, WorkerLost, 1), ("KeyError: 'key'", WorkerError, 0)):
        calls = [workers.submit(rank, "update", "update") for rank in range(3)]
        for rank, answer in workers.open("update")[-3:]:
            if rank != 1:
                answer.set_exception(workers.error(rank, "update", text))
        with pytest.raises(WorkerError) as caught:
            await workers.answers(calls)
        error = caught.value
        assert (type(error), error.rank, error.node, error.stage) == (kind, named, "host0", "update")
        assert text in "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_a_dead_rank_is_not_blamed_where_another_one_is_stopped() -> None:
    """NCCL ends the processes of ranks that have waited too long."""
    group = Fakes("actor", 2)
    died = group.lost(0, "update", "its process died (SIGABRT)")
    group.states[1] = "stopped"
    found = run(group.root_cause(died))
    assert isinstance(found, WorkerLost)
    says(found, "actor worker 1", "'update'", "stopped")
    group.states[1] = "dead"
    assert run(group.root_cause(died)) is died, "both may have waited for each other"


# --- the loop ------------------------------------------------------------------------------------------------------
async def double(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(f"{number}")
    return 2 * number


def test_values_and_errors_come_back_also_where_a_loop_runs_already() -> None:
    """As in a notebook. The loop does not wait for itself."""

    async def cell() -> int:
        return run(double(3))

    assert run(double(4)) == blocking(double)(4) == 8
    assert asyncio.run(cell()) == 6
    with pytest.raises(ValueError, match="-1"):
        run(double(-1))
    with pytest.raises(AssertionError, match="await"):
        run(cell())


def test_an_interrupted_wait_cancels_the_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    def interrupt(*args: object) -> None:
        begun.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(endless())
    assert ended.wait(60)
