"""The driver's asyncio event loop, in a thread of its own, and how long a worker may take to answer.

All code that talks to workers is a coroutine on this loop, so no two pieces of it run at the same time. The training
loop itself stays in the main thread, where signals arrive, and waits there for one coroutine after the other (`run`).
The separate thread also lets a notebook, whose main thread already runs an event loop, call the trainer.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpo_dist driver", daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the driver's loop and wait for its result. Must not be called on the loop itself.

    An exception that interrupts the wait, such as KeyboardInterrupt, also cancels the coroutine.
    """
    if asyncio._get_running_loop() is _loop():
        coroutine.close()
        raise AssertionError("run() called on the event loop would deadlock: await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    finally:
        future.cancel()  # does nothing to one that is done


def in_background(coroutine: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Start a coroutine as a task, which is in `tasks` until it ends. Awaiting it raises its error."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)

    def forget(task: asyncio.Task[T]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as seen; asyncio would log it if nobody awaits the task

    task.add_done_callback(forget)
    return task


def give(future: asyncio.Future[Any], value: Any) -> None:
    """Give a result or, as an exception, an error to one who may not wait any more."""
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
        future.exception()  # marks the error as seen, as above
    else:
        future.set_result(value)


def blocking(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Turn a coroutine method into a blocking one, for code outside the driver's loop."""

    @functools.wraps(method)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(*args, **kwargs))

    return wait


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that a call may take; a worker that takes longer counts as hung.

    `stage_s` has them by the stage's name, as an error report gives it ("generate", "update", ...), and `default_s` is
    of every other stage.
    """

    default_s: float
    stage_s: Mapping[str, float] = field(default_factory=dict)

    def of(self, stage: str) -> float:
        """Seconds that a call of this stage may take."""
        return self.stage_s.get(stage, self.default_s)
