"""vLLM's profiler on a real engine, and how its files are taken."""

from __future__ import annotations

import gzip
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.profile import clear_traces, take_traces
from grpo_dist.errors import EngineError
from grpo_dist.workers.group import WorkerGroup
from tests.engines.vllm.test_engine import PROMPTS, generate, sampling
from tests.messages import refuses

SETTINGS = EngineSettings("", "cpu", "float32", False, 1, 96, 64, 128, 0.8, None, True, False, 0)


@pytest.mark.ray
def test_a_profile_has_the_engines_steps_each_time(rollouts: WorkerGroup, tmp_path: Path) -> None:
    for number in (1, 2):
        rollouts.call(0, "profile", "start_profile")
        generate(rollouts, 0, PROMPTS, sampling(max_tokens=4, ignore_eos=True))
        rollouts.call(0, "profile", "stop_profile", str(tmp_path / f"{number}.json.gz"))
    generate(rollouts, 0, PROMPTS, sampling(max_tokens=4))
    assert sorted(os.listdir(tmp_path)) == ["1.json.gz", "2.json.gz"]
    for number in (1, 2):
        with gzip.open(tmp_path / f"{number}.json.gz", "rt") as stream:
            names = [event["name"] for event in json.load(stream)["traceEvents"] if event["ph"] == "X"]
        counts = [re.match(r"execute_context_(\d+)\(\d+\)_generation_(\d+)", name) for name in names]
        tokens = sum(int(found[1]) + int(found[2]) for found in counts if found)
        assert tokens == len(PROMPTS) * 2 * 4, "of all steps, whenever each prompt came"
        assert {"aten::embedding", "aten::linear"} & set(names)


@pytest.mark.ray
def test_an_engine_that_was_made_without_one_says_so(rollouts: WorkerGroup, tmp_path: Path) -> None:
    with refuses(EngineError, "vLLM", "profiler-config"):
        rollouts.call(1, "profile", "start_profile")


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        (["rank0.177.pt.trace.json.gz"], {"rollout_rank3.json.gz": "rank0.177.pt.trace.json.gz"}),
        (
            ["rank1.177.pt.trace.json.gz", "rank0.178.pt.trace.json.gz", "rank10.177.pt.trace.json.gz"],
            {
                "rollout_rank3_worker0.json.gz": "rank0.178.pt.trace.json.gz",
                "rollout_rank3_worker1.json.gz": "rank1.177.pt.trace.json.gz",
                "rollout_rank3_worker2.json.gz": "rank10.177.pt.trace.json.gz",
            },
        ),
    ],
)
def test_each_process_of_an_engine_has_a_file(tmp_path: Path, written: list[str], taken: dict[str, str]) -> None:
    settings = replace(SETTINGS, profile_dir=str(tmp_path / ".rollout3"))
    folder = tmp_path / ".rollout3"
    folder.mkdir()
    (folder / "rank7.1.pt.trace.json.gz").write_text("of a step that was not ended")
    clear_traces(settings)
    folder.mkdir()
    for name in [*written, "rank0.profiler_out.txt"]:
        (folder / name).write_text(name)
    take_traces(settings, tmp_path / "rollout_rank3.json.gz")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == taken


def test_without_a_trace_the_reason_is_named(tmp_path: Path) -> None:
    settings = replace(SETTINGS, profile_dir=str(tmp_path / ".rollout0"))
    with refuses(EngineError, f"{tmp_path}/.rollout0", "actor_rollout_ref.rollout.engine_kwargs.vllm.profiler_config"):
        take_traces(settings, tmp_path / "rollout_rank0.json.gz")
