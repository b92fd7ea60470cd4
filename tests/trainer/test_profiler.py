"""Which processes are asked for a profile when, what is noted of calls, and that nothing of it ends a run."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.config.load import load_config
from grpo_dist.errors import EngineError, GrpoDistError, WorkerError
from grpo_dist.trainer import profiler
from grpo_dist.trainer.profiler import StepProfiler
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.call import Call
from grpo_dist.workers.event_loop import run
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.mailbox import Posted, Request
from tests.messages import says


class Noted(WorkerGroup):
    """Processes that are none, and answer at once; `log` has what they are asked, those of `failing` fail at it."""

    def __init__(self, role: str, size: int, log: list[str]) -> None:
        super().__init__(role, [f"process {rank}" for rank in range(size)], TimeLimits(60.0))
        self.log = log
        self.failing: dict[str, GrpoDistError] = {}

    def submit(self, rank: int, stage: str, method: str, *args: Any) -> Call:
        call = Call(method, self, rank, stage, time.monotonic(), 60.0, self.handles[rank])  # type: ignore[arg-type]
        self.log.append(" ".join([method, self.role, str(rank), *(Path(each).name for each in args)]))
        return call

    async def value(self, call: Call) -> Any:
        if (error := self.failing.get(str(call.ref))) is not None:
            raise error


class Step:
    """A profiler of steps 2 and 3 with an actor of two ranks, an engine and a reward process."""

    def __init__(self, folder: Path) -> None:
        config, _ = load_config([f"trainer.default_local_dir={folder}", "trainer.profile_steps=[2,3]"])
        self.folder = folder / "profiles"
        self.log: list[str] = []
        self.told: list[str] = []
        self.groups = {
            role: Noted(role, size, self.log) for role, size in {"actor": 2, "rollout": 1, "reward": 1}.items()
        }
        self.profiler = StepProfiler(config.trainer, list(self.groups.values()), self.told.append)

    def call(self, role: str, rank: int, stage: str, method: str, *args: Any) -> Call:
        """A call that was sent, and of which the profiler is told."""
        call = Call(None, self.groups[role], rank, stage, time.monotonic(), 60.0, "process")
        self.profiler.sent(call, method, args)
        return call

    def calls(self, step: int) -> list[dict[str, Any]]:
        return [event for event in self.trace(step)["traceEvents"] if event["ph"] == "X" and event["cat"] != "driver"]

    def trace(self, step: int) -> dict[str, Any]:
        with gzip.open(self.folder / f"step_{step}" / "driver.json.gz", "rt") as stream:
            return json.load(stream)


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path)


def batch(*uids: str) -> DataProtoRef:
    return DataProtoRef((), {"uid": np.array(uids)}, len(uids))


def test_ranks_and_engines_are_profiled_in_the_steps_that_are_named(step: Step) -> None:
    for number in (1, 2, 4):
        run(step.profiler.begin(number))
        run(step.profiler.end())
    started = ["start_profile actor 0", "start_profile actor 1", "start_profile rollout 0"]
    files = [f"{each.replace('start', 'stop')} {each.split()[1]}_rank{each[-1]}.json.gz" for each in started]
    assert step.log == started + files
    assert os.listdir(step.folder) == ["step_2"]
    assert step.told == []


def test_calls_and_stages_of_the_step_are_in_its_trace(step: Step) -> None:
    before = step.call("rollout", 0, "generate", "generate", batch("a"))
    step.profiler.answered(before)
    running = step.call("actor", 1, "update", "update", batch("a", "a", "b"), 7)
    run(step.profiler.begin(2))
    now = time.monotonic()
    step.profiler.note_stage("rollout", now, now)
    scored = step.call("reward", 0, "score", "score", batch("b"))
    for call in (running, scored):
        step.profiler.answered(call)
    step.profiler.answered(scored)  # its wait was begun twice
    step.call("rollout", 0, "generate", "collect", "box")
    step.call("actor", 0, "memory", "peak_memory_gib")
    run(step.profiler.end())
    step.profiler.note_stage("update_weights", now, now)
    found = {event["name"]: event["args"] for event in step.calls(2)}
    assert found.keys() == {"update", "score", "peak_memory_gib"}
    assert found["update"]["groups"] == 2
    assert found["score"]["group"] == "b"
    assert found["peak_memory_gib"]["unanswered"]
    assert [e["name"] for e in step.trace(2)["traceEvents"] if e.get("cat") == "driver"] == ["step 2", "rollout"]


def test_what_is_posted_is_about_the_group_that_it_names(step: Step) -> None:
    async def posted() -> Call:
        return Call(
            None, step.groups["rollout"], 0, "generate", time.monotonic(), 60.0, "process",
            posted=Posted(Request(0, "generate", ()), asyncio.get_running_loop().create_future()),
        )  # fmt: skip

    run(step.profiler.begin(2))
    call = run(posted())
    step.profiler.sent(call, "generate", ("step2-7", np.array([1, 2])))
    step.profiler.answered(call)
    run(step.profiler.end())
    assert [event["args"]["group"] for event in step.calls(2)] == ["step2-7"]


def test_the_calls_that_are_kept_are_bounded(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MOST_CALLS", 2)
    run(step.profiler.begin(2))
    for _ in range(5):
        step.profiler.answered(step.call("reward", 0, "score", "score", batch("a")))
    run(step.profiler.end())
    assert len(step.calls(2)) == 2
    assert step.trace(2)["dropped_calls"] == 3
    says(step.told, "trainer.profile_steps", "step 2", "3 calls")


def test_a_step_that_is_done_again_replaces_its_traces(step: Step) -> None:
    stale = step.folder / "step_3" / "actor_rank7.json.gz"
    stale.parent.mkdir(parents=True)
    stale.touch()
    run(step.profiler.begin(3))
    run(step.profiler.end())
    assert os.listdir(stale.parent) == ["driver.json.gz"]


@pytest.mark.parametrize(
    ("method", "error", "reason"),
    [
        ("start_profile", EngineError("vLLM did not answer within 600 s"), "600 s"),
        (
            "stop_profile",
            WorkerError("its process died", "actor", 0, "node", "profile", "a traceback"),
            "its process died",
        ),
    ],
)
def test_a_profile_that_fails_is_told_and_ends_nothing(
    step: Step, method: str, error: GrpoDistError, reason: str
) -> None:
    step.groups["actor"].failing[method] = error
    for number in (2, 3):
        run(step.profiler.begin(number))
        run(step.profiler.end())
    assert len(step.told) == 4, "two ranks, two steps"
    for number in (2, 3):
        for rank in (0, 1):
            says(step.told, f"actor rank {rank}", f"step {number}", *reason.split())
    assert not any("traceback" in text for text in step.told)
    assert sum(each.startswith("stop_profile rollout") for each in step.log) == 2, "the others go on"
    assert step.trace(3)["step"] == 3


def test_a_process_that_was_replaced_is_told_and_not_asked(step: Step) -> None:
    run(step.profiler.begin(2))
    step.groups["rollout"].handles[0] = "another process"
    run(step.profiler.end())
    says(step.told, "rollout rank 0", "step 2", "replaced")
    assert len(step.told) == 1
    assert not any(each.startswith("stop_profile rollout") for each in step.log)


@pytest.mark.parametrize("breaks", ["begin", "end"])
def test_a_folder_that_cannot_be_written_is_told(step: Step, breaks: str) -> None:
    """A file lies where a folder is needed; at the end it is the folder itself that is gone."""
    asked: dict[str, Callable[[], object]] = {
        "begin": lambda: step.folder.write_text(""),
        "end": lambda: (step.folder / "step_2").rmdir(),
    }
    if breaks == "begin":
        asked[breaks]()
    run(step.profiler.begin(2))
    if breaks == "end":
        asked[breaks]()
    run(step.profiler.end())
    says(step.told, "trainer.profile_steps", "step 2", f"{step.folder}/step_2")
    assert len(step.told) == 1
