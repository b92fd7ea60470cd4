"""What a process knows of its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist import assets
from grpo_dist.errors import ConfigError
from grpo_dist.workers import process as process_module
from grpo_dist.workers.process import Process
from tests.messages import refuses, says


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(Process, "here", lambda self: "node gpu7 (10.0.0.7)")
    return Process()


def test_a_folder_of_the_node(process: Process, tmp_path: Path) -> None:
    assert process.find_model(str(tmp_path)) == str(tmp_path)
    assert Path(process.find_model("builtin:tiny-qwen3"), "config.json").is_file()


def test_a_folder_that_is_on_another_node(process: Process, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        process.find_model(str(tmp_path / "mine"))
    told = str(caught.value)
    says(told, "gpu7 (10.0.0.7)", f"actor_rollout_ref.model.path={tmp_path}/mine", "share")


def test_a_model_that_the_hub_does_not_give_to_a_node(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, key: str, *, weights: bool) -> str:
        raise ConfigError(f"{key}={name}: 401")

    monkeypatch.setattr(assets, "_from_hub", refuse)
    with refuses(ConfigError, "gpu7 (10.0.0.7)", "actor_rollout_ref.model.path=a/gated: 401"):
        process.find_model("a/gated")


def test_a_node_with_the_other_build(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "build_problem", lambda device: f"no {device} here")
    with refuses(ConfigError, "gpu7 (10.0.0.7)", "cuda here"):
        process.check_build("cuda")
