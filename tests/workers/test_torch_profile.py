"""Torch's own profiler on an engine of two ranks: what its trace has, and where it is written."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.errors import EngineError
from grpo_dist.workers import gang
from grpo_dist.workers.gang import TorchProfile
from tests.messages import refuses
from tests.models import objective, random_batch, trainable_engine
from tests.ranks import run_ranks


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as stream:
        return json.load(stream)


def profiled_rank(rank: int, path: str, folder: str) -> None:
    engine, data = trainable_engine(path), random_batch(num_groups=2, n=2)
    engine.compute_log_probs(data, PassLimits("", 4))
    profile = TorchProfile()
    engine.train_mini_batch(data, objective(), PassLimits("", 4))
    profile.write(Path(folder, f"actor_rank{rank}.json.gz"))


def test_the_trace_of_a_rank_has_its_update(random_models: dict[str, str], tmp_path: Path) -> None:
    before = time.time_ns()
    run_ranks(2, profiled_rank, random_models["tied"], str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["actor_rank0.json.gz", "actor_rank1.json.gz"]
    for file in tmp_path.iterdir():
        trace = read(file)
        names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
        assert {"aten::mm", "aten::embedding"} <= names, "forward"
        assert any("AutogradEngine" in name or "Backward0" in name for name in names), "backward, in torch's own thread"
        assert any("all_gather" in name for name in names), "FSDP gathers weights"
        assert any(name.startswith("FSDP::") for name in names)
        assert any("Optimizer.step" in name for name in names)
        moments = [
            trace["baseTimeNanoseconds"] + 1000 * event["ts"] for event in trace["traceEvents"] if "dur" in event
        ]
        assert before <= min(moments), "times are since 1970, from its base on"
        assert max(moments) <= time.time_ns()


def recorded(path: Path, calls: int) -> int:
    """How many of the calls of a module are in the profile of them, which replaces the one before."""
    module = torch.nn.Linear(2, 2)
    profile = TorchProfile()
    for _ in range(calls):
        module(torch.ones(1, 2))
    profile.write(path)
    assert os.listdir(path.parent) == [path.name]
    return [event["name"] for event in read(path)["traceEvents"]].count("aten::linear")


def test_the_modules_that_are_recorded_are_bounded_and_a_trace_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json.gz"
    assert recorded(path, 20) == 20
    monkeypatch.setattr(gang, "MOST_MODULE_CALLS", 7)
    assert recorded(path, 20) == 7
    profile = TorchProfile()
    with refuses(EngineError, f"{tmp_path}/gone/x.json.gz"):
        profile.write(tmp_path / "gone" / "x.json.gz")
    assert recorded(path, 5) == 5, "the next profile counts anew"
    assert not torch.nn.modules.module._global_forward_pre_hooks
