"""The result of the checks before Ray starts, and how their errors become one."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

from grpo_dist.errors import ConfigError, GrpoDistError

Data = TypeVar("Data")


@dataclass(frozen=True)
class Ready(Generic[Data]):
    """The result of the checks.

    Attributes:
        data: what the run trains on, with `identity`, and `counts` of its rows in a line.
        steps: number of training steps.
        notes: for the user.
        again: whether the run starts its workers again, after one of them was lost.
    """

    data: Data
    steps: int
    notes: list[str]
    again: bool = field(default=False, kw_only=True)


class Checks:
    """Collects the errors of the checks, each of which runs in its own `with` block."""

    def __init__(self) -> None:
        self.errors: list[GrpoDistError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if isinstance(error, GrpoDistError) and str(error) not in map(str, self.errors):
            self.errors.append(error)
        return isinstance(error, GrpoDistError)

    def end(self) -> None:
        """Raise all collected errors as one."""
        if len(self.errors) == 1:
            (error,) = self.errors
            raise (error if isinstance(error, ConfigError) else ConfigError(str(error))) from None
        if self.errors:
            listed = "\n  ".join(str(error) for error in self.errors)
            raise ConfigError(f"the run has {len(self.errors)} problems:\n  {listed}")
