"""Profiles of chosen steps (`trainer.profile_steps`): a torch trace of each rank and engine, and Ray's timeline.

A step's window is what `timing_s/step` measures: a role's profiler is started before it, and stopped after it. A rank
that is at work then, as it may be where the engines sample ahead, takes the order when its call is done. Reward
processes run Python and no model: their calls are in Ray's timeline alone.

A profile that fails is told, and ends nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from grpo_dist.config.schema import TrainerConfig
from grpo_dist.engines.train.durable_files import delete
from grpo_dist.errors import GrpoDistError, WorkerError
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.cluster import TIMELINE_VARIABLE
from grpo_dist.runtime.group import WorkerGroup

TIMELINE = "ray"
# Ids of the timeline's processes begin above those that Linux gives, so that the traces of ranks can be put beside.
FIRST_PID = 10_000_000
# A task's id in hex ends with that of its actor.
_ACTOR_ID_DIGITS = 32
_WITHOUT_PROFILE = "reward"

Event = dict[str, Any]


@dataclass
class _Window:
    """The step that is being profiled; `profiling`: the calls that have started a profiler each."""

    step: int
    folder: Path
    profiling: list[Call]
    began: float = field(default_factory=time.time)


class StepProfiler:
    """Profiles the steps that the config names."""

    def __init__(self, config: TrainerConfig, groups: Sequence[WorkerGroup], tell: Callable[[str], None]) -> None:
        self._steps, self._folder = frozenset(config.profile_steps or ()), config.profile_dir.absolute()
        self._groups, self._tell = {group.role: group for group in groups}, tell
        self._window: _Window | None = None

    async def begin(self, step: int) -> None:
        """Begin to profile a step, if it is to be. What an earlier attempt at it has written is removed."""
        if step not in self._steps:
            return
        folder = self._folder / f"step_{step}"
        try:
            await asyncio.to_thread(delete, folder)
            folder.mkdir(parents=True)
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
        ended, asked = time.time(), []
        for call in window.profiling:
            if call.is_current:
                path = str(window.folder / f"{call.group.role}_rank{call.rank}.json.gz")
                asked.append(self._groups[call.group.role].submit(call.rank, "profile", "stop_profile", path))
            else:
                self._warn(window.step, call, "its process was replaced during the step")
        await self._settle(window.step, asked)
        ranks = {
            group.handles[rank]._actor_id.hex(): f"{role} rank {rank}"
            for role, group in self._groups.items()
            for rank in group.present
        }
        if why := await asyncio.to_thread(_write_timeline, window, ended, ranks):
            self._tell(f"trainer.profile_steps: no timeline of step {window.step}: {why}. The run goes on")

    async def _settle(self, step: int, calls: Sequence[Call]) -> set[Call]:
        """Wait for calls, and tell of those that have failed; returns them."""
        answers = zip(calls, await next(iter(self._groups.values())).outcomes(calls), strict=True)
        failed = {call: answer for call, answer in answers if isinstance(answer, GrpoDistError)}
        for call, error in failed.items():
            self._warn(step, call, error.message if isinstance(error, WorkerError) else str(error))
        return set(failed)

    def _warn(self, step: int, call: Call, why: str) -> None:
        where = f"{call.group.role} rank {call.rank}"
        self._tell(f"trainer.profile_steps: no profile of {where} in step {step}: {why}. The run goes on")


def _write_timeline(window: _Window, ended: float, ranks: Mapping[str, str]) -> str:
    """Write the part of Ray's timeline within the window; returns why there is none, or "". `ended`: since 1970."""
    try:
        events = [
            event
            for event in ray.timeline() or ()
            if event["ts"] < ended * 1e6 and event["ts"] + event["dur"] > window.began * 1e6
        ]
        if not events:
            return f"Ray reports no calls, as with {TIMELINE_VARIABLE}=0; start Ray with {TIMELINE_VARIABLE}=200"
        trace = {"displayTimeUnit": "ms", "baseTimeNanoseconds": 0, "traceEvents": numbered(events, ranks)}
        with gzip.open(window.folder / f"{TIMELINE}.json.gz", "wt", encoding="utf-8") as stream:
            json.dump(trace, stream)
    except Exception as error:  # noqa: BLE001 - also one that Ray raises: a profile ends no run
        return f"{type(error).__name__}: {error}"
    return ""


def numbered(events: Sequence[Event], ranks: Mapping[str, str]) -> list[Event]:
    """Return events of Ray's timeline with numbers for its nodes and processes, which Perfetto asks for, and their
    names beside: of a node its address, of a worker its role and rank, by actor id in `ranks`.
    """
    names = {
        event["tid"]: ranks[actor]
        for event in events
        if (actor := event["args"].get("task_id", "")[-_ACTOR_ID_DIGITS:]) in ranks
    }
    nodes = {node: FIRST_PID + index for index, node in enumerate(dict.fromkeys(event["pid"] for event in events))}
    in_order = sorted({(names.get(event["tid"], "~"), event["tid"], event["pid"]) for event in events})
    threads = {thread: number for number, (_, thread, _) in enumerate(in_order, start=1)}
    metadata = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"node {node}"}}
        for node, pid in nodes.items()
    ] + [
        {"ph": "M", "name": "thread_name", "pid": nodes[node], "tid": threads[thread], "args": {"name": shown}}
        for _, thread, node in in_order
        for shown in [names.get(thread, thread)]
    ]
    return metadata + [{**event, "pid": nodes[event["pid"]], "tid": threads[event["tid"]]} for event in events]
