"""Profiles of chosen steps (`trainer.profile_steps`): a torch trace of every rank and engine, and one of the calls.

A step's window is what `timing_s/step` measures: a role's profiler is started before it, and stopped after it. A rank
that is at work then, as it may be where the engines sample ahead, takes the order when its call is done. Reward
processes run Python and no model: their calls are in the driver's trace alone.

Whatever goes wrong with a profile is told, and ends nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.config.schema import TrainerConfig
from grpo_dist.engines.train.durable_files import delete
from grpo_dist.errors import GrpoDistError, WorkerError
from grpo_dist.tracking.step_trace import DRIVER, Span, step_trace, write_trace
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.call import Call
from grpo_dist.workers.group import WorkerGroup

# The calls of a step that are kept, so that a long step does not fill the driver's memory.
MOST_CALLS = 100_000
# Methods that carry what was posted, which is noted itself.
_CARRIERS = ("take", "collect")
_WITHOUT_PROFILE = "reward"


@dataclass
class _Window:
    """The step that is being profiled; `profiling`: the calls that have started a profiler each."""

    step: int
    folder: Path
    profiling: list[Call]
    base_ns: int = field(default_factory=time.time_ns)
    began: float = field(default_factory=time.monotonic)
    stages: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)
    dropped: int = 0

    def note(self, call: Span) -> None:
        if len(self.calls) < MOST_CALLS:
            self.calls.append(call)
        else:
            self.dropped += 1


class StepProfiler:
    """Profiles steps, and observes the calls of all worker groups meanwhile (`CallObserver`).

    Args:
        config: `profile_steps`, and where profiles are written.
        groups: of all roles.
        tell: shows a message.
    """

    def __init__(self, config: TrainerConfig, groups: Sequence[WorkerGroup], tell: Callable[[str], None]) -> None:
        self._steps, self._folder = frozenset(config.profile_steps or ()), config.profile_dir.absolute()
        self._groups, self._tell = {group.role: group for group in groups}, tell
        self._open: dict[
            Call, tuple[str, tuple[str, ...]]
        ] = {}  # method and groups, also before a step that is profiled
        self._window: _Window | None = None
        for group in groups:
            group.observer = self

    async def begin(self, step: int) -> None:
        """Begin to profile a step, if it is to be. What an earlier attempt at it has written is removed."""
        if step not in self._steps:
            return
        folder = self._folder / f"step_{step}"
        try:
            await asyncio.to_thread(_make_anew, folder)
        except OSError as error:
            self._tell(f"trainer.profile_steps: step {step} is not profiled: {error}")
            return
        asked = [
            group.submit(rank, "profile", "start_profile")
            for group in self._groups.values()
            if group.role != _WITHOUT_PROFILE
            for rank in group.present
        ]
        failed = await self._settle(step, asked)
        self._window = _Window(step, folder, [call for call in asked if call not in failed])

    async def end(self) -> None:
        """End the profile of the step that is being profiled, if one is, and write its traces."""
        window, self._window = self._window, None
        if window is None:
            return
        ended, asked = time.monotonic(), []
        for call, about in self._open.items():
            window.note(_span(call, about, ended, is_open=True))
        for call in window.profiling:
            if call.is_current:
                path = str(window.folder / f"{call.group.role}_rank{call.rank}.json.gz")
                asked.append(self._groups[call.group.role].submit(call.rank, "profile", "stop_profile", path))
            else:
                self._warn(window.step, call, "its process was replaced during the step")
        await self._settle(window.step, asked)
        await asyncio.to_thread(self._write, window, ended)

    def note_stage(self, name: str, started: float, ended: float) -> None:
        """Note a stage of the driver; times of `time.monotonic()`."""
        if self._window is not None:
            self._window.stages.append(Span(name, started, ended))

    # --- as `CallObserver` -------------------------------------------------------------------------------------
    def sent(self, call: Call, method: str, args: tuple[Any, ...]) -> None:
        """See `CallObserver`."""
        if method not in _CARRIERS:
            self._open[call] = method, _groups_of(call, args)

    def answered(self, call: Call) -> None:
        """See `CallObserver`."""
        about = self._open.pop(call, None)
        if about is not None and self._window is not None:
            self._window.note(_span(call, about, time.monotonic()))

    # --- parts -------------------------------------------------------------------------------------------------
    async def _settle(self, step: int, calls: Sequence[Call]) -> set[Call]:
        """Wait for calls, and tell of those that have failed; returns them."""
        found = zip(calls, await next(iter(self._groups.values())).outcomes(calls), strict=True)
        failed = {call: answer for call, answer in found if isinstance(answer, GrpoDistError)}
        for call, error in failed.items():
            self._warn(step, call, error.message if isinstance(error, WorkerError) else str(error))
        return set(failed)

    def _warn(self, step: int, call: Call, why: str) -> None:
        where = f"{call.group.role} rank {call.rank}"
        self._tell(f"trainer.profile_steps: no profile of {where} in step {step}: {why}. The run goes on")

    def _write(self, window: _Window, ended: float) -> None:
        times = {"base_ns": window.base_ns, "dropped": window.dropped}
        trace = step_trace(window.step, window.began, ended, stages=window.stages, calls=window.calls, **times)
        try:
            write_trace(window.folder / f"{DRIVER}.json.gz", trace)
        except OSError as error:
            self._tell(f"trainer.profile_steps: no trace of the calls of step {window.step}: {error}. The run goes on")
        if window.dropped:
            self._tell(
                f"trainer.profile_steps: step {window.step} had {window.dropped} calls more than its trace holds"
            )


def _make_anew(folder: Path) -> None:
    delete(folder)
    folder.mkdir(parents=True)


def _groups_of(call: Call, args: tuple[Any, ...]) -> tuple[str, ...]:
    """The groups that a call is about: one that is to be generated, or those of a batch."""
    if call.posted is not None:
        return (str(args[0]),)
    uids = [uid for each in args if isinstance(each, DataProtoRef) for uid in each.small.get("uid", ())]
    return tuple(dict.fromkeys(map(str, uids)))


def _span(call: Call, about: tuple[str, tuple[str, ...]], ended: float, *, is_open: bool = False) -> Span:
    method, groups = about
    return Span(method, call.started, ended, call.group.role, call.rank, call.stage, groups, is_open)
