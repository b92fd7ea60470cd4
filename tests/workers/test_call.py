"""What a group tells the observer of its calls; test_group.py has calls of real processes."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from grpo_dist.errors import WorkerLost
from grpo_dist.workers.call import Call
from grpo_dist.workers.event_loop import run
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.limits import TimeLimits
from tests.messages import refuses


class Process:
    """Answers every method with its name and arguments, as Ray's actor handles do."""

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            answer: Future[Any] = Future()
            answer.set_result((name, *args))
            return SimpleNamespace(future=lambda: answer)

        both = SimpleNamespace(remote=lambda *args: (remote(*args), "data"))
        return SimpleNamespace(remote=remote, options=lambda num_returns: both)


class Observer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def sent(self, call: Call, method: str, args: tuple[Any, ...]) -> None:
        self.told.append(("sent", call.rank, call.stage, method, *args))

    def answered(self, call: Call) -> None:
        self.told.append(("answered", call.rank))


def observed(*handles: Any) -> tuple[WorkerGroup, Observer]:
    group, observer = WorkerGroup("actor", handles, TimeLimits(60.0)), Observer()
    group.observer = observer
    return group, observer


def test_it_is_told_of_calls_and_of_their_answers() -> None:
    async def ask() -> list[tuple[Any, ...]]:
        group, observer = observed(Process(), Process())
        assert await group.submit(1, "memory", "peak", 5).answer() == ("peak", 5)
        call = group.submit_for_data(0, "update", "update", "rows")
        assert (await call.answer(), call.data) == (("update", "rows"), "data")
        return observer.told

    assert run(ask()) == [
        ("sent", 1, "memory", "peak", 5),
        ("answered", 1),
        ("sent", 0, "update", "update", "rows"),
        ("answered", 0),
    ]


def test_it_is_told_of_what_is_posted_whatever_becomes_of_it() -> None:
    async def post(outcome: Any) -> list[tuple[Any, ...]]:
        process = Process()
        group, observer = observed(process)
        posted = SimpleNamespace(answered=asyncio.get_running_loop().create_future())
        group._postboxes[0] = SimpleNamespace(process=process, post=lambda *request: posted)  # type: ignore[assignment]
        group.post(0, "generate", "generate", "uid")
        posted.answered.set_exception(outcome) if isinstance(outcome, Exception) else posted.answered.cancel()
        await asyncio.wait([posted.answered])
        await asyncio.sleep(0)
        return observer.told

    for outcome in (WorkerLost("died"), None):
        assert run(post(outcome)) == [("sent", 0, "generate", "generate", "uid"), ("answered", 0)]


def test_what_no_process_gets_was_not_sent() -> None:
    async def ask() -> list[tuple[Any, ...]]:
        group, observer = observed(None)
        with refuses(WorkerLost, "actor"):
            await group.submit(0, "update", "update").answer()
        return observer.told

    assert run(ask()) == []
