"""Which processes are asked for a profile when, what is taken of Ray's timeline, and that nothing of it ends a run."""

import gzip
import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from grpo_dist.errors import EngineError, WorkerError
from grpo_dist.plan.commands import load_config
from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.profiler import FIRST_PID, StepProfiler
from tests.messages import says
from tests.runtime.fakes import Fakes


class Step:
    """A profiler of steps 2 and 3 with an actor of two ranks, an engine and a reward process."""

    def __init__(self, folder: Path) -> None:
        config, _ = load_config([f"trainer.default_local_dir={folder}", "trainer.profile_steps=[2,3]"])
        self.folder = folder / "profiles"
        self.told: list[str] = []
        self.groups = {role: Fakes(role, size) for role, size in (("actor", 2), ("rollout", 1), ("reward", 1))}
        for role, group in self.groups.items():
            group.handles = [process(actor_id(role, rank)) for rank in range(len(group))]
        self.profiler = StepProfiler(config.trainer, list(self.groups.values()), self.told.append)
        self.reported = [event("actor", 0, "update", time.time(), 3600.0)]  # a call that every step cuts

    def profile(self, step: int) -> None:
        run(self.profiler.begin(step))
        run(self.profiler.end())

    def trace(self, step: int) -> dict[str, Any]:
        with gzip.open(self.folder / f"step_{step}" / "ray.json.gz", "rt") as stream:
            return json.load(stream)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    step = Step(tmp_path)
    monkeypatch.setattr(ray, "timeline", lambda: step.reported)
    return step


def process(number: str) -> Any:
    return SimpleNamespace(_actor_id=bytes.fromhex(number))


def actor_id(role: str, rank: int) -> str:
    return f"{role}{rank}".encode().hex().rjust(32, "0")


def event(role: str, rank: int, method: str, start: float, seconds: float) -> dict[str, Any]:
    """A call as `ray.timeline` has it, begun at `start`, in seconds since 1970."""
    args = {"name": method, "task_id": "0123456789abcdef" + actor_id(role, rank)}
    place = {"pid": "192.0.2.7", "tid": f"worker:{role}{rank}", "ts": start * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "cat": f"task::{role}", "name": method, **place, "args": args}


def test_ranks_and_engines_are_profiled_in_the_steps_that_are_named(step: Step) -> None:
    """A step that is done again replaces its traces."""
    (step.folder / "step_2").mkdir(parents=True)
    (step.folder / "step_2" / "actor_rank7.json.gz").touch()
    for number in (1, 2, 4):
        step.profile(number)
    for role, ranks in (("actor", (0, 1)), ("rollout", (0,))):
        asked = [(name, rank, *(Path(file).name for file in files)) for name, rank, *files in step.groups[role].asked]
        stops = [("stop_profile", rank, f"{role}_rank{rank}.json.gz") for rank in ranks]
        assert asked == [*(("start_profile", rank) for rank in ranks), *stops]
    assert step.groups["reward"].asked == []
    assert os.listdir(step.folder) == ["step_2"]
    assert os.listdir(step.folder / "step_2") == ["ray.json.gz"]
    assert step.told == []


def test_the_calls_of_the_step_are_in_its_timeline_with_the_role_and_rank_of_their_process(step: Step) -> None:
    run(step.profiler.begin(2))
    now = time.time()
    of_a_call = {"ph": "X", "cat": "task:execute", "name": "task:execute", "args": {}}
    step.reported = [
        event("rollout", 0, "before", now - 60, 30),
        event("actor", 1, "update", now - 60, 3600),
        {**event("actor", 1, "", now, 1), **of_a_call},
        event("reward", 0, "score", now, 1e-6),
        event("another", 0, "of_another_program", now, 1),
        event("rollout", 0, "after", now + 60, 30),
    ]
    run(step.profiler.end())
    trace = step.trace(2)
    named = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    calls = [(named[e["tid"]], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    of_actor = [("actor rank 1", "update"), ("actor rank 1", "task:execute")]
    assert calls == [*of_actor, ("reward rank 0", "score"), ("worker:another0", "of_another_program")]
    (node,) = (e for e in trace["traceEvents"] if e["name"] == "process_name")
    assert (node["pid"], node["args"]["name"]) == (FIRST_PID, "node 192.0.2.7")
    assert {e["pid"] for e in trace["traceEvents"]} == {FIRST_PID}
    assert trace["baseTimeNanoseconds"] == 0, "times are since 1970"
    assert step.told == []


def test_a_cluster_that_reports_no_calls_is_told(step: Step) -> None:
    for reports in ([], None):
        step.reported = reports  # type: ignore[assignment]
        step.told.clear()
        step.profile(2)
        (told,) = step.told
        says(told, "trainer.profile_steps", "step 2", "RAY_task_events_report_interval_ms")


@pytest.mark.parametrize(
    ("method", "error", "reason"),
    [
        ("start_profile", EngineError("vLLM did not answer within 600 s"), "600 s"),
        ("stop_profile", WorkerError("it died", "actor", 0, "node", "profile", "a traceback"), "it died"),
    ],
)
def test_a_profile_that_fails_is_told_and_ends_nothing(step: Step, method: str, error: Any, reason: str) -> None:
    step.groups["actor"].results[method] = dict.fromkeys(range(2), error)
    for number in (2, 3):
        step.profile(number)
    assert len(step.told) == 4, "two ranks, two steps"
    for number, rank in itertools.product((2, 3), (0, 1)):
        says(step.told, f"actor rank {rank}", f"step {number}", *reason.split())
    assert not any("traceback" in text for text in step.told)
    assert step.groups["rollout"].order.count(("stop_profile", 0)) == 2, "the others go on"
    assert step.trace(3)["traceEvents"]


def test_a_process_that_was_replaced_is_told_and_not_asked(step: Step) -> None:
    run(step.profiler.begin(2))
    step.groups["rollout"].handles[0] = process("ab")
    run(step.profiler.end())
    (told,) = step.told
    says(told, "rollout rank 0", "step 2", "replaced")
    assert ("stop_profile", 0) not in step.groups["rollout"].order


@pytest.mark.parametrize("breaks", ["begin", "end"])
def test_a_folder_that_cannot_be_written_is_told(step: Step, breaks: str) -> None:
    """A file lies where a folder is needed; at the end it is the folder itself that is gone."""
    if breaks == "begin":
        step.folder.write_text("")
    run(step.profiler.begin(2))
    if breaks == "end":
        (step.folder / "step_2").rmdir()
    run(step.profiler.end())
    (told,) = step.told
    says(told, "trainer.profile_steps", "step 2", f"{step.folder}/step_2")
