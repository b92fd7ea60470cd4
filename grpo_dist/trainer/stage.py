"""@stage: timing, checks and error notes that all stages of the training loop share.

A stage is a coroutine. When it is called, it runs on the driver's event loop, and the training loop waits for it in the
main thread. It names the batch columns it needs and the ones it adds. The decorator checks both, measures the time,
shows the phase in the progress display, and adds a note with stage and step to any error.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from grpo_dist.errors import GrpoDistError
from grpo_dist.protocol.fields import require
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run

P = ParamSpec("P")
T = TypeVar("T")


def stage(
    name: str, *, needs: tuple[str, ...] = (), adds: tuple[str, ...] = (), counted: bool = False
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, T]]:
    """Decorate a method of the trainer as a stage.

    The trainer has `step` (int), `timings` (dict of seconds by stage) and `progress`. If the stage takes a batch, it
    is the first argument; if the stage adds columns, it returns the new batch.

    Args:
        name: of the stage, in metrics and errors.
        needs: columns that the batch must have.
        adds: columns that the returned batch must have.
        counted: whether the trainer's `step` is already that of the finished step when the stage runs.

    Raises (from the decorated method):
        BatchError: a needed column is missing before, or a promised one after.
    """

    def decorate(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        @functools.wraps(method)
        def wait(*args: P.args, **kwargs: P.kwargs) -> T:
            trainer: Any = args[0]
            if needs:
                require(name, args[1].columns, needs)  # type: ignore[attr-defined]
            trainer.progress.phase(name)
            started = time.monotonic()
            try:
                result = run(method(*args, **kwargs))
            except GrpoDistError as error:
                error.add_note(f"in stage {name!r} of step {trainer.step + (not counted)}")
                raise
            trainer.timings[name] = trainer.timings.get(name, 0.0) + time.monotonic() - started
            if adds:
                assert isinstance(result, DataProtoRef)
                require(f"{name} (its result)", result.columns, adds)
            return result

        wait.stage = (name, needs, adds)  # type: ignore[attr-defined]
        return wait

    return decorate
