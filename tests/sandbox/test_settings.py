"""Where programs' sandboxes get their settings from: the config, and what a run tells the processes that it starts."""

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray

from grpo_dist.checks.own_code import started_scorer
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.rewards.contract import Sample
from grpo_dist.run.build import spawn_roles
from grpo_dist.runtime.process import shared_environment
from grpo_dist.sandbox import SandboxSettings
from grpo_dist.sandbox.base import VARIABLE, given

# A reward function that runs its response.
RUNS_CODE = """
from grpo_dist.sandbox import open_sandbox

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open_sandbox() as sandbox:
        outcome = sandbox.exec(["python3", "-c", solution_str], timeout=100)
    return {"score": float(outcome.stdout == b"42\\n"), "memory": float(outcome.ended_by == "memory")}
"""


def test_the_defaults_outside_of_a_run_are_those_of_the_config() -> None:
    config, _ = load_config([])
    assert asdict(SandboxSettings()) == config.sandbox.model_dump()
    assert SandboxSettings.of_run() == SandboxSettings()


def test_processes_that_a_run_starts_know_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    config, _ = load_config(["sandbox.memory_mib=77", "sandbox.backend=podman", "sandbox.image=python:3.12"])
    with given(config.sandbox.model_dump()):
        assert asdict(SandboxSettings.of_run()) == config.sandbox.model_dump()
        assert shared_environment(os.environ)[VARIABLE] == os.environ[VARIABLE]
        with given({}):
            assert SandboxSettings.of_run() == SandboxSettings()
        assert SandboxSettings.of_run().memory_mib == 77
    assert SandboxSettings.of_run() == SandboxSettings()


def test_a_reward_function_runs_code(bwrap: None, tmp_path: Path) -> None:
    (file := tmp_path / "reward.py").write_text(RUNS_CODE)
    config, _ = load_config([f"custom_reward_function.path={file}", "sandbox.memory_mib=100"])
    programs = ("print(6 * 7)", "print(6 * 9)", "held = []\nwhile True:\n    held.append(b'x' * 10**6)")
    with started_scorer(config) as scorer:
        results: Any = scorer.score([Sample(text, "code", "42", {}, []) for text in programs])
    assert [(result.score, result.extra["memory"]) for result in results] == [(1, 0), (0, 0), (0, 1)]


@pytest.mark.ray
@pytest.mark.deep
def test_the_workers_of_a_run_know_its_settings(local_ray: None, tmp_path: Path) -> None:
    config, _ = load_config(["sandbox.memory_mib=77", f"trainer.default_local_dir={tmp_path}"])
    with ExitStack() as stack:
        roles = spawn_roles(make_plan(config, 1), stack)
        for group in (roles.rollout, roles.reward):
            (handle, *_) = group.workers.handles
            told = handle.__ray_call__.remote(lambda worker: asdict(SandboxSettings.of_run()))
            assert ray.get(told) == config.sandbox.model_dump()
