"""Every part of the engine layer, small and on CPU, where nothing is installed but what the layer needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_check import process, update
from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.process import run_part, why_not
from benchmarks.gpu_check.results import Figure, Findings, Result
from benchmarks.gpu_check.scale import QWEN3_06B, SCALES
from benchmarks.gpu_check.work import Work
from grpo_dist.errors import OutOfMemory
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.memory import memory_estimate
from tests.benchmarks.gpu_check.engine_parts import ABSENT, ENGINE, SETUP, engine_parts
from tests.messages import says
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("parts")
    return {result.part: result for result in run_ranks(1, engine_parts, folder)[0]}


def figures(results: dict[str, Result], part: str) -> dict[str, Figure]:
    return {figure.what: figure for figure in results[part].figures}


@pytest.mark.deep
def test_all_parts_run_without_ray_vllm_and_the_rest(results: dict[str, Result]) -> None:
    ended = {result.part: (result.status, result.reason) for result in results.values()}
    asks_gpu = ("skipped", "it asks about a GPU")
    assert ended == {part.name: asks_gpu if part.asks_gpu or part.gpus > 1 else ("done", "") for part in ENGINE}


def test_all_parts_are_imported_by_a_process_that_has_no_more_than_they_need() -> None:
    """Also those that need GPUs; and here nothing has been imported before."""
    modules = sorted({part.function.partition(":")[0] for part in ENGINE})
    code = f"import sys, importlib; sys.modules.update(dict.fromkeys({ABSENT}))\n"
    code += f"for name in {modules}: importlib.import_module('benchmarks.gpu_check.' + name)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.deep
def test_what_is_right_on_a_gpu_is_right_here(results: dict[str, Result]) -> None:
    """Attention, head, layouts and export are held against their tolerances; speeds and sizes against nothing."""
    held = {
        part: [figure.met for figure in result.figures if figure.met is not None] for part, result in results.items()
    }
    assert {part: met for part, met in held.items() if met} == {
        "head": [True],
        "attention": [True] * 4,  # at two lengths, and of one and of four rows of two tokens
        "layouts": [True] * 10,  # six engines that did not fall back, four differences
        "update": [True],
        "weights": [True],
    }


def test_a_part_says_what_it_cannot_measure_here(results: dict[str, Result]) -> None:
    missing = {part: [f.what for f in result.figures if f.value is None] for part, result in results.items()}
    kernels = [f"rows of 2 tokens, {rows} of them: kernels for decoding" for rows in (1, 4)]
    assert missing["attention"] == [*kernels, "compiled graphs"]
    assert missing["update"] == ["peak of the GPU's memory"]
    assert missing["weights"][-1] == "weights and optimizer states to CPU memory and back"
    assert all(f.note for result in results.values() for f in result.figures if f.value is None)


def test_rates_follow_from_the_seconds(results: dict[str, Result]) -> None:
    """Two micro-batches of 32 + 4 * 24 = 128 tokens."""
    found = figures(results, "update")
    seconds, tokens = found["update of 2 micro-batches"].value, found["tokens, prompts counted once"].value
    assert seconds
    assert tokens == pytest.approx(256 / seconds)
    speeds = figures(results, "layout_speed")
    assert speeds["packed takes"].value == pytest.approx(speeds["packed"].value / speeds["shared"].value)  # type: ignore[operator]


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


def test_short_micro_batches_are_noted_and_not_judged(results: dict[str, Result], tmp_path: Path) -> None:
    """16 + 4 * 12 = 64 tokens here; on a GPU at full scale the long ones are judged, and only they."""
    found = [figure for name, figure in figures(results, "update").items() if name.startswith("micro-batches of 64")]
    assert [figure.unit for figure in found] == ["/s", ""]
    assert all(figure.value for figure in found)
    work = Work("cpu", SCALES["small"], tmp_path, Findings(holds=True))
    rates, engine = (
        iter([(1.0, 4.0), (1.0, 1.0)]),
        SimpleNamespace(forward=SimpleNamespace(layout="shared", compiler=None)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update.workload, "join_process_group", lambda device: None)
        patch.setattr(update.workload, "engine", lambda *args, **options: engine)
        patch.setattr(update, "_step", lambda *args: None)
        patch.setattr(update, "_memory", lambda *args: None)
        patch.setattr(update, "square_rate", lambda work: 40.0)
        patch.setattr(update, "_rates", lambda *args: next(rates))
        update.update(work)
    held = {figure.what: (figure.value, figure.met) for figure in work.found.figures if "MFU" in figure.what}
    assert held == {
        "of the matrix product's rate (MFU)": (0.1, False),
        "micro-batches of 64 tokens: of the matrix product's rate (MFU)": (0.025, None),
    }


@pytest.mark.parametrize(("layers", "minutes"), [(("engine", "whole"), 10), (("engine",), 7)])
def test_how_long_the_check_takes_where_all_goes_well(layers: tuple[str, ...], minutes: int) -> None:
    assert sum(part.seconds for part in PARTS if part.gpus == 1 and part.layer in layers) < minutes * 60


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, two = Part("a", "whole", "", 1, ""), Part("b", "engine", "", 1, "", gpus=2)
    says(why_not(two, "cpu"), "GPU")
    monkeypatch.setattr(process, "torch_is_for_cpu", lambda: True)
    says(why_not(two, "cuda"), "CPU", "Python", "--device cpu")
    monkeypatch.setattr("benchmarks.gpu_check.parts.find_spec", lambda name: None if name in ("ray", "vllm") else name)
    says(why_not(whole, "cpu"), "ray, vllm", "make setup DEVICE=gpu")


def test_one_gpu_is_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(process, "torch_is_for_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert why_not(Part("a", "engine", "", 1, ""), "cuda") == ""
    says(why_not(Part("a", "engine", "", 1, "", gpus=2), "cuda"), "2 GPUs", "1")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OutOfMemory("the memory of the GPU is not enough for a pass"), "out of memory"),
        (ValueError("no"), "failed"),
    ],
)
def test_what_a_part_has_found_outlives_its_error(
    error: Exception, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(work: Any) -> None:
        work.found.note("before", 1.0)
        raise error

    monkeypatch.setitem(sys.modules, "benchmarks.gpu_check.made_up", SimpleNamespace(part=part))
    result = run_part(Part("a", "engine", "made_up:part", 1, ""), tmp_path, SETUP)
    assert (result.status, [figure.what for figure in result.figures]) == (status, ["before"])
    assert result.reason == f"{type(error).__name__}: {error}"
