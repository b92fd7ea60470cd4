"""Stop and go on: on as many ranks, on fewer, on more. The run that went on equals the one that was never stopped."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.durable_files import FileDigest, digest_file
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.sharded_tensors import local_shard
from grpo_dist.protocol import metric_values
from tests.engines.train.plain import built, told, weights
from tests.messages import says
from tests.models import objective, random_batch, scheduled
from tests.ranks import run_ranks


def engine_with_schedule(path: str, optimizer: dict[str, Any] | None = None, **changes: Any) -> FSDPEngine:
    """Warm-up and cosine: every step has a learning rate of its own, so a lost schedule shows."""
    return built(path, scheduled(**({"lr": 1e-2, "warmup": 2} | (optimizer or {}))), **changes)


def step(engine: FSDPEngine, rank: int, world_size: int, number: int) -> dict[str, float]:
    data = random_batch(num_groups=4, n=2, seed=number).index(list(range(rank, 8, world_size)))
    return metric_values(engine.train_mini_batch(data, objective(), PassLimits("", 4)).metrics)


def save_engine(engine: FSDPEngine, folder: Path) -> dict[str, FileDigest]:
    engine.begin_save(folder)
    files = engine.finished_save(wait=True)
    assert files is not None
    return files


def draw() -> list[float]:
    return [*torch.rand(3).tolist(), random.random(), random.gauss(0, 1)]


def uninterrupted(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """Two ranks: steps 0 and 1, save, step 2; a fresh engine that loads; and saves that fail."""
    engine = engine_with_schedule(path)
    for number in range(2):
        step(engine, rank, 2, number)
    saved = weights(engine)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    random.gauss(0, 1)  # which keeps a second number for the next call
    engine.begin_save(folder / "two")
    metrics = step(engine, rank, 2, 2)  # while it is written
    drawn = draw()
    files = engine.finished_save(wait=True)
    assert engine.finished_save(wait=False) == files, "it may be asked more than once"
    failures = [told(save_engine, engine, folder / "two/__0_0.distcp")]  # a file, not a folder
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # as on a full disk: the shards are larger
    failures.append(told(save_engine, engine, folder / "full"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine_with_schedule(path).load_checkpoint(folder / "two")
    found = {"saved": saved, "after": weights(engine), "metrics": metrics, "failures": failures}
    return found | {"files": files, "drawn": drawn, "drawn again": draw()}


def go_on(rank: int, world_size: int, models: dict[str, str], source: Path, target: Path | None) -> dict[str, Any]:
    """A fresh engine that loads, perhaps saves again, and takes step 2."""
    engine = engine_with_schedule(models["tied"])
    engine.load_checkpoint(source)
    loaded = weights(engine)
    if target is not None:
        save_engine(engine, target)
    metrics = step(engine, rank, world_size, 2)
    errors = [
        told(engine_with_schedule(models[model]).load_checkpoint, folder)
        for folder, model in ((source / "absent", "tied"), (source, "untied"))
    ]
    return {"loaded": loaded, "after": weights(engine), "metrics": metrics, "errors": errors}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(random_models: dict[str, str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        "uninterrupted": run_ranks(2, uninterrupted, random_models["tied"], folder),
        "2 -> 1": run_ranks(1, go_on, 1, random_models, folder / "two", folder / "one"),
        "1 -> 2": run_ranks(2, go_on, 2, random_models, folder / "one", None),
    }


@pytest.mark.parametrize("ranks", ["2 -> 1", "1 -> 2"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(runs: dict, ranks: str, folder: Path) -> None:
    """Adam's moments, its step count and the learning rate all enter the weights. What cannot be read is named."""
    expected = runs["uninterrupted"][0]
    for result in runs[ranks]:
        assert result["loaded"].keys() == expected["saved"].keys()
        assert result["metrics"]["actor/lr"] == expected["metrics"]["actor/lr"]
        assert result["metrics"]["actor/grad_norm"] == pytest.approx(expected["metrics"]["actor/grad_norm"], rel=1e-4)
        for name, weight in expected["after"].items():
            np.testing.assert_array_equal(result["loaded"][name], expected["saved"][name], err_msg=name)
            np.testing.assert_allclose(result["after"][name], weight, rtol=1e-4, atol=1e-5, err_msg=name)
        absent, other = result["errors"]
        says(absent, "CheckpointError", folder, "checkpoint")
        says(other, "CheckpointError", "lm_head")


def test_the_step_is_one_that_shows(runs: dict) -> None:
    """Without the optimizer's state the same step would have moved the weights by another amount."""
    run = runs["uninterrupted"][0]
    assert run["metrics"]["actor/lr"] == pytest.approx(1e-2), "step 2 of a warm-up of 2: the peak"
    moved = np.concatenate([(run["after"][name] - run["saved"][name]).ravel() for name in run["saved"]])
    assert 1e-4 < np.abs(moved).mean() < 0.9e-2, "a fresh Adam would move nearly every weight by the rate itself"


def test_each_rank_tells_what_it_wrote_or_could_not_write(runs: dict, folder: Path) -> None:
    written = {name: digest for result in runs["uninterrupted"] for name, digest in result["files"].items()}
    assert written == {path.name: digest_file(path) for path in (folder / "two").iterdir()}
    assert set(written) == {".metadata", "__0_0.distcp", "__1_0.distcp", "random_0.pt", "random_1.pt"}
    for result in runs["uninterrupted"]:
        no_folder, full = result["failures"]
        says(no_folder, "CheckpointError", "rank 0:")
        assert "File exists" in no_folder or "Not a directory" in no_folder
        says(full, "rank 0:", "rank 1:", "Errno 27")


def test_random_states_go_on_on_as_many_ranks(runs: dict) -> None:
    first, second = runs["uninterrupted"]
    assert first["drawn"] == first["drawn again"]
    assert second["drawn"] == second["drawn again"]
    assert not set(first["drawn"]) & set(second["drawn"])


CHANGED = {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.5, "override_optimizer_config": {"eps": 1e-4}}


def go_on_with_other_settings(rank: int, path: str, source: Path) -> dict[str, Any]:
    engine = engine_with_schedule(path, CHANGED)
    engine.load_checkpoint(source)
    [group] = engine.optimizer.param_groups
    return {"group": dict(group, params=None), "steps": [step(engine, rank, 1, number) for number in (2, 3)]}


def test_settings_of_the_optimizer_are_those_of_the_present_config(
    runs: dict, random_models: dict[str, str], folder: Path
) -> None:
    """The moments and the place in the schedule are the saved ones."""
    [result] = run_ranks(1, go_on_with_other_settings, random_models["tied"], folder / "one")
    first, second = result["steps"]
    assert first["actor/lr"] == pytest.approx(3e-3), "step 2 of a warm-up of 2: the peak"
    assert second["actor/lr"] == pytest.approx(3e-3 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi / 4))))
    assert [result["group"][name] for name in ("weight_decay", "betas", "eps")] == [0.5, (0.8, 0.9), 1e-4]
    norm = runs["uninterrupted"][0]["metrics"]["actor/grad_norm"]
    assert first["actor/grad_norm"] == pytest.approx(norm, rel=1e-4), "the weights are the saved ones"


def saved_first(rank: int, path: str, folder: Path) -> list[dict[str, np.ndarray]]:
    """The weights after a step: of an engine alone, of one that was saved before it, and of one resumed from there."""
    made = [engine_with_schedule(path) for _ in range(3)]
    save_engine(made[1], folder)
    made[2].load_checkpoint(folder)
    for engine in made:
        step(engine, rank, 1, 0)
    return [weights(engine) for engine in made]


def test_a_checkpoint_before_the_first_step_changes_no_step(random_models: dict[str, str], tmp_path: Path) -> None:
    """As of a policy that stands still while its critic warms up."""
    ((alone, saved, resumed),) = run_ranks(1, saved_first, random_models["tied"], tmp_path / "first")
    for name, weight in alone.items():
        np.testing.assert_array_equal(saved[name], weight)
        np.testing.assert_array_equal(resumed[name], weight)


def experts(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """Steps 0 and 1, save, step 2; and a fresh engine that loads and takes step 2."""
    engine = engine_with_schedule(path)
    stack = engine.model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    for number in range(2):
        step(engine, rank, 2, number)
    save_engine(engine, folder)
    again = engine_with_schedule(path)
    again.load_checkpoint(folder)
    return {
        "units": [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)],
        "held": (tuple(stack.shape), tuple(local_shard(stack).shape)),
        "metrics": [step(each, rank, 2, 2) for each in (engine, again)],
        "weights": (weights(engine), weights(again)),
    }


@pytest.mark.deep
def test_experts_go_on_bit_by_bit(random_models: dict[str, str], tmp_path: Path) -> None:
    """A layer with all of its experts is gathered at once; of the stack each of two ranks holds whole experts."""
    for result in run_ranks(2, experts, random_models["experts"], tmp_path):
        assert result["units"] == ["", "model.layers.0", "model.layers.1"]
        assert result["held"] == ((8, 96, 32), (4, 96, 32))
        assert result["metrics"][0] == result["metrics"][1]
        went_on, resumed = result["weights"]
        for name, weight in went_on.items():
            np.testing.assert_array_equal(resumed[name], weight, err_msg=name)
