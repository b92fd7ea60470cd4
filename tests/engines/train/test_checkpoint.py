"""Stop and go on: on as many ranks, on fewer, on more. The run that went on equals the one that was never stopped."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from grpo_dist.algorithms.settings import PreferenceSettings
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.checkpoint import (
    RANDOM_STATES,
    random_states,
    set_random_states,
)
from grpo_dist.engines.train.durable_files import FileDigest, digest_file
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.sharded_tensors import local_shard
from grpo_dist.errors import CheckpointError
from grpo_dist.protocol import metric_values
from tests.engines.train.test_objectives import pairs
from tests.messages import says
from tests.models import objective, random_batch, scheduled
from tests.ranks import run_ranks
from tests.worker_settings import model_settings


def engine_with_schedule(path: str) -> FSDPEngine:
    """Warm-up and cosine: every step has a learning rate of its own, so a lost schedule shows."""
    model = model_settings(path)
    optimizer = scheduled(lr=1e-2, warmup=2)
    return FSDPEngine(model, device="cpu", temperature=1.0, optimizer=optimizer, total_steps=6, grad_clip=1.0)


def step(engine: FSDPEngine, rank: int, world_size: int, number: int) -> dict[str, float]:
    rows = list(range(rank, 8, world_size))
    data = random_batch(num_groups=4, n=2, seed=number).index(rows)
    return metric_values(engine.train_mini_batch(data, objective(), PassLimits("", 4)).metrics)


def weights(engine: FSDPEngine) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")}


def save_engine(engine: FSDPEngine, folder: Path) -> dict[str, FileDigest]:
    engine.begin_save(folder)
    files = engine.finished_save(wait=True)
    assert files is not None
    return files


def uninterrupted(rank: int, models: dict[str, str], folder: Path) -> dict[str, Any]:
    """Two ranks: steps 0 and 1, save, step 2. Then export; and the untied model's export."""
    engine = engine_with_schedule(models["tied"])
    for number in range(2):
        step(engine, rank, 2, number)
    saved = weights(engine)
    torch.manual_seed(100 + rank)
    engine.begin_save(folder / "two")
    metrics = step(engine, rank, 2, 2)  # while it is written
    random = torch.rand(3).tolist()
    files = engine.finished_save(wait=True)
    assert engine.finished_save(wait=False) == files, "it may be asked more than once"
    untied = engine_with_schedule(models["untied"])
    step(untied, rank, 2, 0)
    data = random_batch(num_groups=2, n=1)
    out = {}
    for name, exported in (("tied", engine), ("untied", untied)):
        exported.export_hf_model(folder / name, "fp32")
        out[name] = (weights(exported), exported.compute_log_probs(data, PassLimits("", 2)).values.numpy())
    failure = ""
    try:
        engine.begin_save(folder / "two/__0_0.distcp")  # a file, not a folder
        engine.finished_save(wait=True)
    except CheckpointError as error:
        failure = str(error)
    again = engine_with_schedule(models["tied"])
    again.load_checkpoint(folder / "two")
    again_random = torch.rand(3).tolist()
    return {
        "saved": saved,
        "after": weights(engine),
        "metrics": metrics,
        "exports": out,
        "files": files,
        "random": random,
        "random again": again_random,
        "failure": failure,
        "full": save_onto_a_full_disk(engine, folder / "full"),
    }


def save_onto_a_full_disk(engine: FSDPEngine, folder: Path) -> str:
    """The error of a save where no file may grow beyond 20 kB; the shards are larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        engine.begin_save(folder)
        engine.finished_save(wait=True)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""


def with_another_eps(path: str, source: Path) -> float:
    """Return eps after a resume with another one than the checkpoint's."""
    optimizer = scheduled(override_optimizer_config={"eps": 1e-4})
    engine = FSDPEngine(model_settings(path), device="cpu", temperature=1.0, optimizer=optimizer)
    engine.load_checkpoint(source)
    assert engine.optimizer is not None
    return engine.optimizer.param_groups[0]["eps"]


def go_on(rank: int, world_size: int, models: dict[str, str], source: Path, target: Path | None) -> dict[str, Any]:
    """A fresh engine that loads, perhaps saves again, and takes step 2."""
    engine = engine_with_schedule(models["tied"])
    fresh = weights(engine)
    engine.load_checkpoint(source)
    loaded = weights(engine)
    if target is not None:
        save_engine(engine, target)
    metrics = step(engine, rank, world_size, 2)
    errors, eps = {}, with_another_eps(models["tied"], source)
    for name, folder, model in (("absent", source / "absent", "tied"), ("other", source, "untied")):
        other = engine_with_schedule(models[model])
        try:
            other.load_checkpoint(folder)
        except CheckpointError as error:
            errors[name] = str(error)
    return {
        "fresh": fresh,
        "loaded": loaded,
        "after": weights(engine),
        "metrics": metrics,
        "errors": errors,
        "eps": eps,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(random_models: dict[str, str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        "uninterrupted": run_ranks(2, uninterrupted, random_models, folder),
        "2 -> 1": run_ranks(1, go_on, 1, random_models, folder / "two", folder / "one"),
        "1 -> 2": run_ranks(2, go_on, 2, random_models, folder / "one", None),
    }


@pytest.mark.parametrize("ranks", ["2 -> 1", "1 -> 2"])
def test_loaded_weights_are_the_saved_ones(runs: dict, ranks: str) -> None:
    saved = runs["uninterrupted"][0]["saved"]
    for result in runs[ranks]:
        assert result["loaded"].keys() == saved.keys()
        for name, weight in saved.items():
            np.testing.assert_array_equal(result["loaded"][name], weight, err_msg=name)
    assert any((result["fresh"][name] != saved[name]).any() for name in saved), "the steps before changed nothing"


@pytest.mark.parametrize("ranks", ["2 -> 1", "1 -> 2"])
def test_a_setting_of_the_optimizer_is_that_of_the_present_config(runs: dict, ranks: str) -> None:
    assert [result["eps"] for result in runs[ranks]] == [1e-4] * len(runs[ranks])


@pytest.mark.parametrize("ranks", ["2 -> 1", "1 -> 2"])
def test_the_next_step_equals_the_uninterrupted_one(runs: dict, ranks: str) -> None:
    """Adam's moments, its step count and the learning rate all enter the weights."""
    expected = runs["uninterrupted"][0]
    for result in runs[ranks]:
        assert result["metrics"]["actor/lr"] == expected["metrics"]["actor/lr"]
        assert result["metrics"]["actor/grad_norm"] == pytest.approx(expected["metrics"]["actor/grad_norm"], rel=1e-4)
        for name, weight in expected["after"].items():
            np.testing.assert_allclose(result["after"][name], weight, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_step_is_one_that_shows(runs: dict) -> None:
    """Without the optimizer's state the same step would have moved the weights by another amount."""
    run = runs["uninterrupted"][0]
    assert run["metrics"]["actor/lr"] == pytest.approx(1e-2), "step 2 of a warm-up of 2: the peak"
    moved = np.concatenate([(run["after"][name] - run["saved"][name]).ravel() for name in run["saved"]])
    assert 1e-4 < np.abs(moved).mean() < 0.9e-2, "a fresh Adam would move nearly every weight by the rate itself"


@pytest.mark.parametrize("ranks", ["2 -> 1", "1 -> 2"])
def test_an_unreadable_checkpoint_is_named(runs: dict, ranks: str, folder: Path) -> None:
    for result in runs[ranks]:
        says(result["errors"]["absent"], folder, "checkpoint")
        assert "lm_head" in result["errors"]["other"]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_export_loads_in_transformers(runs: dict, folder: Path, name: str) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    weights, log_probs = runs["uninterrupted"][0]["exports"][name]
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings == (name == "tied")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied")
    assert ("lm_head.weight" in weights) == (name == "untied")
    for key, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), weights[key], err_msg=key)
    assert_log_probs(model, log_probs)


def assert_log_probs(model: Any, log_probs: np.ndarray) -> None:
    """Of each sequence alone, by transformers."""
    data = random_batch(num_groups=2, n=1)
    rows = []
    with torch.no_grad():
        for prompt, response in zip(data["prompts"].rows(), data["responses"].rows(), strict=True):
            logits = model(input_ids=torch.cat([prompt, response]).long().unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
            rows.append(torch.log_softmax(logits, -1).gather(-1, response.long().unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(torch.cat(rows), torch.from_numpy(log_probs), atol=1e-5, rtol=0)


def test_the_export_has_tokenizer_and_generation_config(runs: dict, folder: Path) -> None:
    import transformers

    assert transformers.AutoTokenizer.from_pretrained(folder / "tied").decode([3, 4]) == "w3 w4"
    assert transformers.GenerationConfig.from_pretrained(folder / "tied").eos_token_id == 2


def test_each_rank_tells_what_it_wrote(runs: dict, folder: Path) -> None:
    told = {name: digest for result in runs["uninterrupted"] for name, digest in result["files"].items()}
    on_disk = {path.name: digest_file(path) for path in (folder / "two").iterdir()}
    assert told == on_disk
    assert set(told) == {".metadata", "__0_0.distcp", "__1_0.distcp", "random_0.pt", "random_1.pt"}


def test_random_states_go_on_on_as_many_ranks(runs: dict) -> None:
    first, second = runs["uninterrupted"]
    assert first["random"] == first["random again"]
    assert second["random"] == second["random again"]
    assert first["random"] != second["random"]


def test_a_failure_to_write_is_told_on_every_rank(runs: dict) -> None:
    for result in runs["uninterrupted"]:
        assert "rank 0: " in result["failure"]
        assert "File exists" in result["failure"] or "Not a directory" in result["failure"]
        assert "rank 0: " in result["full"]
        assert "rank 1: " in result["full"]
        assert "File too large" in result["full"], result["full"]


def test_random_states_round_trip_through_a_file(tmp_path: Path) -> None:
    import random

    torch.manual_seed(5)
    random.seed(5)
    random.gauss(0, 1)
    path = tmp_path / RANDOM_STATES.format(rank=0)
    torch.save(random_states(), path)
    expected = torch.rand(4).tolist(), [random.random() for _ in range(4)], random.gauss(0, 1)
    set_random_states(torch.load(path, weights_only=True))
    assert (torch.rand(4).tolist(), [random.random() for _ in range(4)], random.gauss(0, 1)) == expected


def go_on_with_another_rate(rank: int, path: str, source: Path) -> dict[str, Any]:
    model = model_settings(path)
    optimizer = scheduled(lr=3e-3, betas=(0.8, 0.9), warmup=2, weight_decay=0.5)
    engine = FSDPEngine(model, device="cpu", temperature=1.0, optimizer=optimizer, total_steps=6, grad_clip=1.0)
    engine.load_checkpoint(source)
    [group] = engine.optimizer.param_groups
    first = step(engine, rank, 1, 2)
    return {"group": dict(group, params=None), "first": first, "second": step(engine, rank, 1, 3)}


@pytest.mark.deep
def test_a_learning_rate_that_was_changed_holds(runs: dict, random_models: dict[str, str], folder: Path) -> None:
    """The moments and the place in the schedule are the saved ones, the settings those of the config."""
    [result] = run_ranks(1, go_on_with_another_rate, random_models["tied"], folder / "one")
    assert result["first"]["actor/lr"] == pytest.approx(3e-3), "step 2 of a warm-up of 2: the peak"
    assert result["second"]["actor/lr"] == pytest.approx(3e-3 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi / 4))))
    assert (result["group"]["weight_decay"], result["group"]["betas"]) == (0.5, (0.8, 0.9))
    norm = runs["uninterrupted"][0]["metrics"]["actor/grad_norm"]
    assert result["first"]["actor/grad_norm"] == pytest.approx(norm, rel=1e-4), "the weights are the saved ones"


# --- a mixture of experts ------------------------------------------------------------------------------------------
def experts(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """Steps 0 and 1, save, step 2, export; and a fresh engine that loads and takes step 2."""
    engine = engine_with_schedule(path)
    stack = engine.model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    for number in range(2):
        step(engine, rank, 2, number)
    save_engine(engine, folder / "checkpoint")
    again = engine_with_schedule(path)
    again.load_checkpoint(folder / "checkpoint")
    metrics = [step(each, rank, 2, 2) for each in (engine, again)]
    engine.export_hf_model(folder / "export", "fp32")
    log_probs = engine.compute_log_probs(random_batch(num_groups=2, n=1), PassLimits("", 2)).values
    return {
        "units": [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)],
        "held": (tuple(stack.shape), tuple(local_shard(stack).shape)),
        "metrics": metrics,
        "weights": (weights(engine), weights(again)),
        "log_probs": log_probs.numpy(),
    }


@pytest.mark.deep
def test_experts_go_on_bit_by_bit_and_are_exported(random_models: dict[str, str], tmp_path: Path) -> None:
    """A layer with all of its experts is gathered at once; of the stack each of two ranks holds whole experts."""
    import transformers

    path = random_models["experts"]
    for result in run_ranks(2, experts, path, tmp_path):
        assert result["units"] == ["", "model.layers.0", "model.layers.1"]
        assert result["held"] == ((8, 96, 32), (4, 96, 32))
        assert result["metrics"][0] == result["metrics"][1]
        went_on, resumed = result["weights"]
        for name, weight in went_on.items():
            np.testing.assert_array_equal(resumed[name], weight, err_msg=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_log_probs(model, result["log_probs"])
    before = dict(transformers.AutoModelForCausalLM.from_pretrained(path).named_parameters())
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), went_on[name], err_msg=name)
        if "mlp" in name:
            assert (parameter != before[name]).any(), f"{name} has been trained"


# --- reward models -------------------------------------------------------------------------------------------------
def pair_steps(engine: FSDPEngine, rank: int, numbers: range) -> list[dict[str, float]]:
    """A step for each number, with two of four pairs on each rank."""
    results = []
    for number in numbers:
        rows = np.arange(8).reshape(2, 4)[(rank + number) % 2]
        result = engine.train_mini_batch(pairs(4).index(rows), PreferenceSettings(), PassLimits("", 2))
        results.append(metric_values(result.metrics))
    return results


def reward_model(path: str, seed: int) -> FSDPEngine:
    model = model_settings(path, enable_gradient_checkpointing=True, num_labels=1, new_head_seed=seed)
    optimizer = scheduled(lr=1e-2, warmup=1)
    return FSDPEngine(model, device="cpu", temperature=1.0, optimizer=optimizer, total_steps=4, grad_clip=1.0)


def stopped_and_not(rank: int, path: str, folder: Path) -> list[Any]:
    """Four steps; and two, a checkpoint, and two more by another engine, whose head was drawn otherwise."""
    whole = reward_model(path, seed=1)
    expected = pair_steps(whole, rank, range(4))
    first = reward_model(path, seed=1)
    pair_steps(first, rank, range(2))
    save_engine(first, folder)
    again = reward_model(path, seed=2)
    again.load_checkpoint(folder)
    return [expected[2:], pair_steps(again, rank, range(2, 4)), weights(whole), weights(again), weights(first)]


@pytest.mark.deep
def test_a_reward_model_that_goes_on_equals_one_that_was_never_stopped(
    random_models: dict[str, str], tmp_path: Path
) -> None:
    for expected, found, whole, again, first in run_ranks(2, stopped_and_not, random_models["tied"], tmp_path / "two"):
        assert found == expected, "bit for bit, learning rate included"
        assert whole.keys() == again.keys()
        assert all(np.array_equal(weight, again[name]) for name, weight in whole.items())
        assert any(not np.array_equal(weight, first[name]) for name, weight in whole.items())


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
