"""Calls of a group whose processes are none; test_group.py has those of real ones."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.errors import WorkerLost
from grpo_dist.runtime import call as module
from grpo_dist.runtime.call import BusyClock
from grpo_dist.runtime.event_loop import TimeLimits
from grpo_dist.runtime.group import WorkerGroup
from tests.messages import refuses


class Process:
    """Answers every method with its name and arguments, as Ray's actor handles do."""

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            answer: Future[Any] = Future()
            answer.set_result((name, *args))
            return SimpleNamespace(future=lambda: answer)

        def options(num_returns: int) -> Any:
            return SimpleNamespace(remote=lambda *args: (remote(*args), "data"))

        return SimpleNamespace(remote=remote, options=options)


def group(*handles: Any) -> WorkerGroup:
    return WorkerGroup("actor", handles, TimeLimits(60.0))


async def test_a_call_has_the_answer_and_the_data_of_its_process() -> None:
    workers = group(Process(), Process())
    call = workers.submit_for_data(0, "update", "update", "rows")
    assert await workers.submit(1, "memory", "peak", 5).answer() == ("peak", 5)
    assert (await call.answer(), call.data) == (("update", "rows"), "data")


async def test_a_rank_without_a_process_is_lost() -> None:
    with refuses(WorkerLost, "actor"):
        await group(None).submit(0, "update", "update").answer()


async def test_a_call_of_a_process_that_was_replaced_is_not_current() -> None:
    workers = group(Process())
    call = workers.submit(0, "update", "update")
    assert call.is_current
    workers.handles[0] = Process()
    assert not call.is_current


def test_open_calls_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from 1 to 4 and from 3 to 6, on top of 10 s before: 5 s more; then idle, then busy again from 8 on."""
    now = [1.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    clock = BusyClock(10.0)
    clock.begin()
    now[0] = 3.0
    clock.begin()
    now[0] = 4.0
    clock.end()
    assert clock.seconds == 13.0
    now[0] = 6.0
    clock.end()
    now[0] = 8.0
    assert clock.seconds == 15.0
    clock.begin()
    now[0] = 8.5
    assert clock.seconds == 15.5


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
