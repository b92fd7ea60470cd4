"""The whole layer, small and on CPU: the main job, the roles of a run, and vLLM alone, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.parts import Part


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_layer_runs_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "limit_s", 900)
    assert main(["--device", "cpu", "--scale", "small", "--layer", "whole", "--out", str(tmp_path)]) == 0
    parts = {part["part"]: part for part in json.loads((tmp_path / "results.json").read_text())["parts"]}
    asked = {name: part["status"] for name, part in parts.items()}
    assert asked == {"model": "done", "main_job": "done", "roles": "done", "broadcast": "skipped", "vllm_alone": "done"}
    found = {name: {figure["what"]: figure for figure in part["figures"]} for name, part in parts.items()}
    assert found["main_job"]["exit code"]["value"] == 0
    assert any(what.startswith("weight sync, object_store, ") for what in found["roles"])
    ours, alone = (found[part][what]["value"] for part, what in (
        ("roles", "our rollout group: tokens"), ("vllm_alone", "vLLM alone: tokens")))  # fmt: skip
    assert found["vllm_alone"]["our rollout group, of vLLM alone"]["value"] == pytest.approx(ours / alone)
    assert not (tmp_path / "cpu-small" / "model").exists()
