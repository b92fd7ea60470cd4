"""200 episodes at once by agents that raise, hang and die: the run ends, and every prompt is accounted for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import episodes
from tests.messages import refuses

SIZES = {"steps": 3, "groups": 25, "n": 8}


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["url", "play"])
def test_a_run_outlives_its_agents(way: str, tmp_path: Path) -> None:
    """The server is killed in the middle of the first step, and comes back after two seconds."""
    episodes.play(tmp_path, way, failing=True, **SIZES)
    figures = episodes.summary(tmp_path, **SIZES)  # raises where a prompt is not accounted for
    assert figures["raised"] > 0
    assert figures["timed out"] > 0
    assert (figures["lost"] > 0) == (way == "url"), "attempts that were under way when the server died"


def files(folder: Path, trained: dict[int, list[int]], dropped: dict[int, int]) -> None:
    """Of a run whose groups have two episodes: by step, the prompts that trained, and how many were dropped."""
    (folder / "rollouts").mkdir()
    rows = []
    for step, prompts in trained.items():
        uids = [f"step{step}-prompt{index}-try2" for index in prompts for _ in range(2)]
        (folder / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps({"uid": uid}) + "\n" for uid in uids))
        more = {"agent/dropped_groups": float(dropped[step]), "agent/failures/timeout": 3.0} if step in dropped else {}
        rows.append({"step": step, "timing_s/step": step * 2.0, **more})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    """Prompts 1 and 4 were dropped. Steps 2 and 3 took 4 and 6 seconds for 4 episodes each."""
    files(tmp_path, {1: [0, 2], 2: [3, 5], 3: [7, 6]}, {1: 1, 2: 1})
    figures = episodes.summary(tmp_path, steps=3, groups=2, n=2)
    assert figures == {
        "seconds a step": 5.0,
        "median": 6.0,
        "episodes/s": 0.8,
        "raised": 0,
        "timed out": 6,
        "lost": 0,
        "dropped groups": 2,
    }


@pytest.mark.parametrize(
    ("trained", "dropped", "told"),
    [
        ({1: [0, 2], 2: [3, 5], 3: [7, 6]}, {1: 1}, "[1, 4]"),  # did not train, and one was dropped
        ({1: [0, 1], 2: [2, 3], 3: [3, 4]}, {}, "[3]"),  # trained twice
        ({1: [0, 1], 2: [2, 3]}, {}, "[1, 2]"),  # the steps that there are
        ({1: [0, 1], 2: [2], 3: [3, 4]}, {}, "step 2"),
    ],
)
def test_what_is_not_accounted_for_is_found(
    tmp_path: Path, trained: dict[int, list[int]], dropped: dict[int, int], told: str
) -> None:
    files(tmp_path, trained, dropped)
    with refuses(RuntimeError, told):
        episodes.summary(tmp_path, steps=3, groups=2, n=2)


def test_ratios_are_of_the_same_agent() -> None:
    """Of the play agent 8 s with failures, 4 of which are a time-out; of the server 20, 15 of which are one."""
    rows = [
        {"agent": agent, "failures": failures, "seconds a step": seconds}
        for agent, failures, seconds in (("url", "none", 4.0), ("url", "with", 20.0), ("play", "none", 3.0))
    ]
    rows.append({"agent": "play", "failures": "with", "seconds a step": 8.0})
    assert episodes.ratios(rows) == {
        "episodes/url, without failures of with": 0.2,
        "episodes/url, beyond time-outs": 0.8,
        "episodes/play, without failures of with": 0.375,
        "episodes/play, beyond time-outs": 0.75,
    }
