"""The driver's event loop, in a thread of its own.

Whatever talks to workers is a coroutine on this loop, so no two pieces of it ever run at the same time. The training
loop itself stays in the main thread, where signals arrive, and waits there for one coroutine after the other (`run`).
A thread of its own also lets a notebook, whose main thread has a running loop, call the trainer.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpo_dist driver", daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the driver's loop and wait for it; not to be called on the loop itself.

    What interrupts the wait, such as a signal, also cancels the coroutine.
    """
    if asyncio._get_running_loop() is _loop():
        coroutine.close()
        raise AssertionError("the loop would wait for itself: await the coroutine")
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    finally:
        future.cancel()  # does nothing to one that is done


def in_background(coroutine: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Have a coroutine go on by itself, as one of `tasks` until it ends. Who waits for it is told if it fails."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)

    def forget(task: asyncio.Task[T]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio complains where nobody waits for it

    task.add_done_callback(forget)
    return task


def blocking(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """A coroutine function as a function that waits, for code outside the driver's loop."""

    @functools.wraps(method)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(*args, **kwargs))

    return wait
