"""The trace of a step, against events worked out by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from grpo_dist.tracking.step_trace import FIRST_PID, Span, step_trace, write_trace

BEGAN = 100.0


def call(name: str, role: str, start: float, end: float, stage: str, *groups: str, rank: int = 0) -> Span:
    return Span(name, BEGAN + start, BEGAN + end, role, rank, stage, groups)


def trace(*calls: Span, stages: tuple[Span, ...] = (), seconds: float = 10.0) -> dict[str, Any]:
    return step_trace(3, BEGAN, BEGAN + seconds, stages=stages, calls=calls, base_ns=7, dropped=0)


def events(found: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == phase]


def tracks(found: dict[str, Any]) -> dict[tuple[str, str], list[tuple[str, float, float]]]:
    """By process and thread: the slices' names, starts and ends in seconds."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events(found, "M") if "name" in e["args"]}
    by_track: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for e in events(found, "X"):
        track = names["process_name", e["pid"], 0], names["thread_name", e["pid"], e["tid"]]
        by_track.setdefault(track, []).append((e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6))
    return by_track


def assert_arrows_bind(found: dict[str, Any]) -> None:
    """Each arrow begins and ends once, not backwards, within a slice of its thread."""
    starts, ends = ({e["id"]: e for e in events(found, phase)} for phase in "sf")
    assert len(starts) == len(events(found, "s")) == len(events(found, "f"))
    assert starts.keys() == ends.keys()
    for each, start in starts.items():
        assert start["ts"] < ends[each]["ts"]
        assert ends[each]["bp"] == "e"
    for arrow in [*starts.values(), *ends.values()]:
        around = [e for e in events(found, "X") if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])]
        assert any(e["ts"] < arrow["ts"] < e["ts"] + e["dur"] for e in around)


def test_a_step_with_its_stages_and_calls() -> None:
    found = trace(
        call("write_rollouts", "reward", 0, 1, "write_samples"),
        call("score", "reward", 4, 5, "score", "a"),
        call("generate", "rollout", 1, 4, "generate", "a"),
        stages=(Span("rollout", BEGAN + 0.5, BEGAN + 6),),
    )
    assert tracks(found) == {
        ("driver", "stages"): [("step 3", 0, 10), ("rollout", 0.5, 6)],
        ("rollout", "rank 0"): [("generate", 1, 4)],
        ("reward", "rank 0"): [("write_rollouts", 0, 1), ("score", 4, 5)],
    }
    assert [process for process, _ in tracks(found)] == ["driver", "reward", "rollout"], "slices in order of time"
    assert (found["step"], found["baseTimeNanoseconds"], found["dropped_calls"]) == (3, 7, 0)
    order = {e["pid"]: e["args"]["sort_index"] for e in events(found, "M") if e["name"] == "process_sort_index"}
    assert order == {FIRST_PID: 0, FIRST_PID + 1: 1, FIRST_PID + 2: 2}
    named = {e["pid"]: e["args"]["name"] for e in events(found, "M") if e["name"] == "process_name"}
    assert list(named.values()) == ["driver", "rollout", "reward"], "in the order in which a group comes to them"
    assert list(named) == list(order)
    (generate,) = (e for e in events(found, "X") if e["name"] == "generate")
    assert generate["args"] == {"stage": "generate", "groups": 1, "waited_ms": 0, "group": "a"}


def test_arrows_lead_from_a_groups_generation_to_what_became_of_it() -> None:
    found = trace(
        call("generate", "rollout", 1, 4, "generate", "a"),
        call("generate", "rollout", 1, 5, "generate", "b"),
        call("score", "reward", 4, 5, "score", "a"),
        call("compute_log_probs", "ref", 5, 6, "ref_log_prob", "a", "b"),
        call("update", "actor", 6, 8, "update", "a", "b"),
        call("update", "actor", 6, 8, "update", "b", rank=1),
        call("write_samples", "reward", 8, 9, "write_samples", "a", "b"),
    )
    assert_arrows_bind(found)
    assert sorted(e["name"] for e in events(found, "s")) == [
        "a to ref_log_prob",
        "a to score",
        "a to update",
        "b to ref_log_prob",
        "b to update",
        "b to update",
    ]
    arrow = events(found, "s")[0]
    assert arrow["ts"] == 4e6 - 0.5, "half a microsecond before the end of the generation"
    assert events(found, "f")[0]["ts"] == 4e6 + 0.5


def test_a_group_that_was_generated_again_has_arrows_from_the_last_time() -> None:
    found = trace(
        call("generate", "rollout", 1, 2, "generate", "a"),
        call("generate", "rollout", 3, 4, "generate", "a", rank=1),
        call("score", "reward", 5, 6, "score", "a"),
        call("score", "reward", 6, 7, "score", "of a step before"),
    )
    assert_arrows_bind(found)
    assert [e["ts"] for e in events(found, "s")] == [4e6 - 0.5]


def test_an_engine_has_a_thread_for_each_call_at_a_time() -> None:
    found = tracks(
        trace(
            call("generate", "rollout", 1, 4, "generate", "a"),
            call("generate", "rollout", 2, 3, "generate", "b"),
            call("generate", "rollout", 3, 5, "generate", "c"),
            call("generate", "rollout", 4, 5, "generate", "d"),
            call("generate", "rollout", 2, 5, "generate", "e", rank=1),
        )
    )
    spans = {track: [each[1:] for each in slices] for track, slices in found.items() if track[0] == "rollout"}
    assert spans == {
        ("rollout", "rank 0"): [(1, 4), (4, 5)],
        ("rollout", "rank 0 (+1)"): [(2, 3), (3, 5)],
        ("rollout", "rank 1"): [(2, 5)],
    }


def test_a_rank_takes_one_call_after_the_other() -> None:
    """What is sent while it works begins when that is done, and tells how long it has waited."""
    found = trace(
        call("update", "actor", 1, 4, "update"),
        call("peak_memory_gib", "actor", 2, 5, "memory"),
        call("export_weights", "actor", 6, 7, "sync_weights"),
    )
    assert tracks(found)["actor", "rank 0"] == [("update", 1, 4), ("peak_memory_gib", 4, 5), ("export_weights", 6, 7)]
    waited = {e["name"]: e["args"]["waited_ms"] for e in events(found, "X") if "waited_ms" in e["args"]}
    assert waited == {"update": 0, "peak_memory_gib": 2000, "export_weights": 0}


def test_what_lies_outside_the_step_is_cut_off() -> None:
    running = Span("generate", BEGAN + 8, BEGAN + 10, "rollout", 0, "generate", ("b",), is_open=True)
    found = trace(call("generate", "rollout", -3, 2, "generate", "a"), running, call("score", "reward", 9, 12, "score"))
    assert tracks(found)["rollout", "rank 0"] == [("generate", 0, 2), ("generate", 8, 10)]
    assert tracks(found)["reward", "rank 0"] == [("score", 9, 10)]
    marked = [e["args"].get("group") for e in events(found, "X") if e["args"].get("unanswered")]
    assert marked == ["b"]


def test_calls_without_a_duration_keep_apart_and_have_room_for_their_arrows() -> None:
    found = trace(
        *(call("generate", "rollout", 1, 1, "generate", uid) for uid in "ab"),
        *(call("score", "reward", 2, 2, "score", uid) for uid in "ab"),
    )
    assert_arrows_bind(found)
    assert len(events(found, "s")) == 2
    slices = tracks(found)["reward", "rank 0"]
    assert [round(end - start, 9) for _, start, end in slices] == [1e-6, 1e-6]
    assert slices[0][2] <= slices[1][1]


def test_the_file_is_whole_and_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "driver.json.gz"
    for step in (1, 2):
        write_trace(path, {"step": step, "traceEvents": []})
    with gzip.open(path, "rt") as stream:
        assert json.load(stream) == {"step": 2, "traceEvents": []}
    assert list(tmp_path.iterdir()) == [path]
