"""Every part, small and on CPU: those of the engine layer where nothing is installed but what the layer needs."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import process, update
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.parts import Part
from benchmarks.gpu_check.process import run_part, why_not
from benchmarks.gpu_check.results import Findings
from benchmarks.gpu_check.scale import QWEN3_06B, SCALES
from benchmarks.gpu_check.work import Work
from grpo_dist.errors import OutOfMemory
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.memory import memory_estimate
from tests.benchmarks.gpu_check.engine_parts import ABSENT, ENGINE, SETUP, engine_parts
from tests.messages import says
from tests.ranks import run_ranks


@pytest.mark.deep
def test_all_parts_run_without_ray_vllm_and_the_rest(tmp_path: Path) -> None:
    """What is right on a GPU is right here; speeds and sizes are held against nothing. What is not measured is said."""
    results = {result.part: result for result in run_ranks(1, engine_parts, tmp_path)[0]}
    ended = {result.part: (result.status, result.reason) for result in results.values()}
    asks_gpu = ("skipped", "it asks about a GPU")
    assert ended == {part.name: asks_gpu if part.asks_gpu or part.gpus > 1 else ("done", "") for part in ENGINE}
    held = {part: [each.met for each in found.figures if each.met is not None] for part, found in results.items()}
    assert {part: met for part, met in held.items() if met} == {
        "head": [True],
        "attention": [True] * 4,  # at two lengths, and of one and of four rows of two tokens
        "layouts": [True] * 10,  # six engines that did not fall back, four differences
        "update": [True],
        "weights": [True],
    }
    missing = {part: [f.what for f in result.figures if f.value is None] for part, result in results.items()}
    kernels = [f"rows of 2 tokens, {rows} of them: kernels for decoding" for rows in (1, 4)]
    assert missing["attention"] == [*kernels, "compiled graphs"]
    assert missing["update"] == ["peak of the GPU's memory"]
    assert missing["weights"][-1] == "weights and optimizer states to CPU memory and back"
    assert all(f.note for result in results.values() for f in result.figures if f.value is None)


@pytest.mark.deep
def test_all_parts_are_imported_by_a_process_that_has_no_more_than_they_need() -> None:
    modules = sorted({part.function.partition(":")[0] for part in ENGINE})
    code = f"import sys, importlib; sys.modules.update(dict.fromkeys({ABSENT}))\n"
    code += f"for name in {modules}: importlib.import_module('benchmarks.gpu_check.' + name)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plan_is_that_of_a_run(tmp_path: Path) -> None:
    """Counted without a config it is what the dry run says: 8 responses of 1,920 after a prompt of 1,024."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_06B))
    work = Work("cuda", SCALES["full"], tmp_path, Findings(holds=False))
    sizes = SCALES["full"].passes["16k"]
    overrides = ["cluster=node8", "cluster.actor_world_size=1", f"actor_rollout_ref.model.path={tmp_path / 'model'}"]
    overrides += ["data.max_prompt_length=1024", "data.max_response_length=1920", "data.train_batch_size=64"]
    config, _ = load_config([*overrides, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"])
    actor = next(role for role in memory_estimate(config, QWEN3_06B) or [] if role.role == "actor")
    assert sizes.tokens == 16_384
    assert update.planned_gib(work, sizes.tokens) == pytest.approx(sum(actor.parts.values()))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, two = Part("a", "whole", "", 1, ""), Part("b", "engine", "", 1, "", gpus=2)
    says(why_not(two, "cpu"), "GPU")
    monkeypatch.setattr(process, "torch_is_for_cpu", lambda: True)
    says(why_not(two, "cuda"), "CPU", "Python", "--device cpu")
    monkeypatch.setattr("benchmarks.gpu_check.parts.find_spec", lambda name: None if name in ("ray", "vllm") else name)
    says(why_not(whole, "cpu"), "ray, vllm", "make setup DEVICE=gpu")
    monkeypatch.setattr(process, "torch_is_for_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert why_not(Part("a", "engine", "", 1, ""), "cuda") == ""
    says(why_not(two, "cuda"), "2 GPUs", "1")


def test_what_a_part_has_found_outlives_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, status in ((OutOfMemory("not enough for a pass"), "out of memory"), (ValueError("no"), "failed")):

        def part(work: Any, error: Exception = error) -> None:
            work.found.note("before", 1.0)
            raise error

        monkeypatch.setitem(sys.modules, "benchmarks.gpu_check.made_up", SimpleNamespace(part=part))
        result = run_part(Part("a", "engine", "made_up:part", 1, ""), tmp_path, SETUP)
        assert (result.status, [figure.what for figure in result.figures]) == (status, ["before"])
        assert result.reason == f"{type(error).__name__}: {error}"


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layer", ["whole", "runs"])
def test_the_whole_layer_runs_on_cpu(layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "limit_s", 900)
    assert main(["--device", "cpu", "--scale", "small", "--layer", layer, "--out", str(tmp_path)]) == 0
    parts = {part["part"]: part for part in json.loads((tmp_path / "results.json").read_text())["parts"]}
    done = {name for name, part in parts.items() if part["status"] == "done"}
    found = {name: {figure["what"]: figure["value"] for figure in part["figures"]} for name, part in parts.items()}
    if layer == "runs":
        assert done == {"seeds", "routes", "float32_head", "changes", "eight_bit"}
        assert [value for what, value in found["seeds"].items() if "differ in a second run" in what] == [0]
        return
    assert (done, parts["broadcast"]["status"]) == ({"model", "main_job", "roles", "vllm_alone"}, "skipped")
    assert found["main_job"]["exit code"] == 0
    assert any(what.startswith("weight sync, object_store, ") for what in found["roles"])
    ours, alone = found["roles"]["our rollout group: tokens"], found["vllm_alone"]["vLLM alone: tokens"]
    assert found["vllm_alone"]["our rollout group, of vLLM alone"] == pytest.approx(ours / alone)
