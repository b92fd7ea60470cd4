"""@stage: what every step of the loop has in common, in one place.

A stage names the batch columns it needs and the ones it adds. The decorator checks both, measures the time, tells the
progress display which phase runs, and notes stage and step on any error. The loop itself then holds only the algorithm.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from grpo_dist.errors import GrpoDistError
from grpo_dist.protocol.fields import require
from grpo_dist.workers.batch_ref import DataProtoRef

Method = TypeVar("Method", bound=Callable[..., Any])


def stage(
    name: str, *, needs: tuple[str, ...] = (), adds: tuple[str, ...] = (), counted: bool = False
) -> Callable[[Method], Method]:
    """Decorate a method of the trainer as a stage.

    The trainer has `step` (int), `timings` (dict of seconds by stage) and `progress`. A batch, if the stage takes one,
    is its first argument; if it adds columns, it returns the new batch. It is `counted` if it comes after the step was.

    Raises (from the decorated method):
        BatchError: a needed column is missing before, or a promised one after.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any) -> Any:
            if needs:
                require(name, args[0].columns, needs)
            self.progress.phase(name)
            started = time.perf_counter()
            try:
                result = method(self, *args)
            except GrpoDistError as error:
                error.add_note(f"in stage {name!r} of step {self.step + (not counted)}")
                raise
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started
            if adds:
                assert isinstance(result, DataProtoRef)
                require(f"{name} (its result)", result.columns, adds)
            return result

        run.stage = (name, needs, adds)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate
