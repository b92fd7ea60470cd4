from __future__ import annotations

import asyncio
import threading

import pytest

from grpo_dist.runtime.event_loop import TimeLimits, blocking, run


async def double(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(f"{number}")
    return 2 * number


def test_values_and_errors_come_back() -> None:
    assert run(double(4)) == blocking(double)(4) == 8
    with pytest.raises(ValueError, match="-1"):
        run(double(-1))


def test_it_is_one_thread_that_goes_on_between_two_waits() -> None:
    gone_on = threading.Event()

    async def begin() -> tuple[str, asyncio.Task[None]]:
        async def go_on() -> None:
            await asyncio.sleep(0)
            gone_on.set()

        return threading.current_thread().name, asyncio.create_task(go_on())

    name, _ = run(begin())
    assert gone_on.wait(60)
    assert (name, run(begin())[0]) == ("grpo_dist driver", "grpo_dist driver")


def test_it_works_where_a_loop_runs_already() -> None:
    """As in a notebook."""

    async def cell() -> int:
        return run(double(3))

    assert asyncio.run(cell()) == 6


def test_an_interrupted_wait_cancels_the_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    begun = threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    def interrupt(*args: object) -> None:
        begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(endless())
    monkeypatch.undo()
    assert ended.wait(60)


def test_the_loop_does_not_wait_for_itself() -> None:
    async def wrong() -> int:
        return run(double(1))

    with pytest.raises(AssertionError, match="await"):
        run(wrong())


def test_a_stage_has_its_own_limit_or_the_default() -> None:
    limits = TimeLimits(1800.0, {"generate": 7.0})
    assert (limits.of("generate"), limits.of("update")) == (7.0, 1800.0)
