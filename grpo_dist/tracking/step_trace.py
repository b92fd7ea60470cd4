"""The driver's calls in one step as a Chrome trace, which Perfetto shows: who waited for whom.

A process of the trace is a role, a thread of it a rank; the driver has its stages. A rank that works on several calls
at a time has a thread for each of them, since slices of a thread may lie within each other but not overlap. Arrows
(flow events) lead from the generation of each group to its score, its passes and its updates. Their ends lie within the
slices that they belong to, which is how Perfetto finds these.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ids of the trace's processes begin above those that Linux gives, so that the traces of ranks can be put beside.
FIRST_PID = 10_000_000
DRIVER = "driver"
# Roles whose processes work on several calls at a time; the others take one after the other.
CONCURRENT_ROLES = ("rollout",)
GENERATE = "generate"
# Stages of calls to which a group's arrows lead.
ARROW_STAGES = (
    "score",
    "reward_model",
    "ref_log_prob",
    "old_log_prob",
    "values",
    "update_critic",
    "update",
)
# Shorter slices would have no room for the ends of two arrows.
LEAST_NS = 1000


@dataclass(frozen=True)
class Span:
    """A stage of the driver, or a call of a worker.

    Attributes:
        name: of the stage, or of the method that was called.
        started: when the stage began, or the call was sent, in seconds of `time.monotonic()`.
        ended: when it ended, or was answered.
        role: of the worker; the driver's own is `DRIVER`.
        rank: of the worker.
        stage: that the call belongs to.
        groups: uids of the groups that it was about.
        is_open: whether it was not answered before the trace ended.
    """

    name: str
    started: float
    ended: float
    role: str = DRIVER
    rank: int = 0
    stage: str = ""
    groups: tuple[str, ...] = ()
    is_open: bool = False


@dataclass
class _Slice:
    """A span in its place; times in ns since the trace began, `lane` is the thread of the rank."""

    span: Span
    sent: int
    start: int
    end: int
    lane: int = 0
    pid: int = 0
    tid: int = 0

    def at(self, ns: int) -> dict[str, Any]:
        return {"pid": self.pid, "tid": self.tid, "ts": ns / 1000}

    def event(self) -> dict[str, Any]:
        span, args = self.span, {}
        if span.role != DRIVER:
            args = {"stage": span.stage, "groups": len(span.groups), "waited_ms": max(0, self.start - self.sent) / 1e6}
            args |= {"group": span.groups[0]} if len(span.groups) == 1 else {}
            args |= {"unanswered": True} if span.is_open else {}
        duration = {"dur": (self.end - self.start) / 1000, "args": args}
        return {"ph": "X", "name": span.name, "cat": span.stage or DRIVER, **self.at(self.start), **duration}


def step_trace(
    step: int, began: float, ended: float, *, stages: Iterable[Span], calls: Iterable[Span], base_ns: int, dropped: int
) -> dict[str, Any]:
    """The trace of a step.

    Args:
        step: its number.
        began: when it began, in seconds of `time.monotonic()`.
        ended: when it ended; what lies outside is cut off.
        stages: the driver's stages.
        calls: of all workers.
        base_ns: the same moment as `began`, in ns since 1970: what 0 is in the trace.
        dropped: how many calls are left out.

    Returns:
        A JSON object in Chrome's trace format, with times in microseconds.
    """

    def place(span: Span) -> _Slice:
        start, end = (round((min(max(at, began), ended) - began) * 1e9) for at in (span.started, span.ended))
        return _Slice(span, round((span.started - began) * 1e9), start, max(end, start + LEAST_NS))

    slices = [place(Span(f"step {step}", began, ended)), *map(place, sorted(stages, key=lambda each: each.started))]
    by_rank: dict[tuple[str, int], list[_Slice]] = defaultdict(list)
    for call in calls:
        by_rank[call.role, call.rank].append(place(call))
    for (role, _), of_rank in by_rank.items():
        slices += _in_lanes(of_rank) if role in CONCURRENT_ROLES else _in_turn(of_rank)
    named = _threads(slices)
    slices.sort(key=lambda each: (each.start, -each.end))
    events = [*named, *(each.event() for each in slices), *_arrows(slices)]
    about = {"step": step, "dropped_calls": dropped}
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, **about, "traceEvents": events}


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace as gzip'ed JSON, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}")
    with gzip.open(temporary, "wt", encoding="utf-8") as stream:
        json.dump(trace, stream)
    temporary.replace(path)


def _in_turn(slices: Sequence[_Slice]) -> list[_Slice]:
    """Calls of a process that takes one after the other: each begins once it is sent and the one before is done."""
    free = 0
    for each in sorted(slices, key=lambda each: each.end):
        each.start = max(each.start, free)
        free = each.end = max(each.end, each.start + LEAST_NS)
    return list(slices)


def _in_lanes(slices: Sequence[_Slice]) -> list[_Slice]:
    """Calls of a process that takes several at a time: each in the first lane that is free."""
    free: list[int] = []
    for each in sorted(slices, key=lambda each: each.start):
        each.lane = next((lane for lane, end in enumerate(free) if end <= each.start), len(free))
        free[each.lane : each.lane + 1] = [each.end]
    return list(slices)


def _threads(slices: Sequence[_Slice]) -> list[dict[str, Any]]:
    """Give each slice its process and thread, in the order in which groups come to the roles; events that name them."""
    of_groups = (GENERATE, *ARROW_STAGES)
    in_order = sorted(slices, key=lambda s: (s.span.role != DRIVER, s.span.stage not in of_groups, s.start))
    roles = list(dict.fromkeys(each.span.role for each in in_order))
    lanes = sorted({(roles.index(each.span.role), each.span.rank, each.lane) for each in slices})
    tids = {lane: number for number, lane in enumerate(lanes, start=1)}
    for each in slices:
        index = roles.index(each.span.role)
        each.pid, each.tid = FIRST_PID + index, tids[index, each.span.rank, each.lane]
    events = []
    for index, role in enumerate(roles):
        process = {"ph": "M", "pid": FIRST_PID + index, "tid": 0}
        events.append({**process, "name": "process_name", "args": {"name": role}})
        events.append({**process, "name": "process_sort_index", "args": {"sort_index": index}})
    for (index, rank, lane), tid in tids.items():
        name = "stages" if roles[index] == DRIVER else f"rank {rank}" + (f" (+{lane})" if lane else "")
        thread = {"ph": "M", "pid": FIRST_PID + index, "tid": tid}
        events.append({**thread, "name": "thread_name", "args": {"name": name}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return events


def _arrows(slices: Sequence[_Slice]) -> list[dict[str, Any]]:
    """From the generation of each group to its score, its passes and its updates. `slices` are in order of time."""
    events: list[dict[str, Any]] = []
    generated: dict[str, _Slice] = {}
    for each in slices:
        if each.span.stage == GENERATE:
            generated |= dict.fromkeys(each.span.groups, each)
        elif each.span.stage in ARROW_STAGES:
            for group in each.span.groups:
                source = generated.get(group)
                if source is not None and source.end <= each.start:
                    arrow = {"cat": "group", "name": f"{group} to {each.span.stage}", "id": len(events) // 2 + 1}
                    events.append({"ph": "s", **arrow, **source.at(source.end - LEAST_NS // 2)})
                    events.append({"ph": "f", "bp": "e", **arrow, **each.at(each.start + LEAST_NS // 2)})
    return events
