"""Stop and go on, on as many ranks, fewer or more, as if never stopped; and what a checkpoint holds."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import durable_files
from grpo_dist.engines.train.checkpoint import SafeReader, copied, load_state
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.errors import CheckpointError
from grpo_dist.protocol import metric_values
from tests.disks import MIB, small_disk
from tests.engines.train.plain import built, told, weights
from tests.messages import refuses, says
from tests.models import objective, random_batch, scheduled, trainable_engine
from tests.ranks import run_ranks
from tests.shards import all_tensors, tensor_bytes
from tests.worker_settings import lora


def engine_with_schedule(path: str, optimizer: dict[str, Any] | None = None, **changes: Any) -> FSDPEngine:
    """Warm-up and cosine: every step has a learning rate of its own, so a lost schedule shows."""
    return built(path, scheduled(**({"lr": 1e-2, "warmup": 2} | (optimizer or {}))), **changes)


def step(engine: FSDPEngine, rank: int, world_size: int, number: int) -> dict[str, float]:
    data = random_batch(num_groups=4, n=2, seed=number).index(list(range(rank, 8, world_size)))
    return metric_values(engine.train_mini_batch(data, objective(), PassLimits("", 4)).metrics)


def save_engine(engine: FSDPEngine, folder: Path) -> dict[str, durable_files.FileDigest]:
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


def go_on(rank: int, world_size: int, models: dict[str, str], source: Path, target: Path) -> dict[str, Any]:
    """A fresh engine that loads, saves again, and takes step 2."""
    engine = engine_with_schedule(models["tied"])
    engine.load_checkpoint(source)
    loaded = weights(engine)
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
        "1 -> 2": run_ranks(2, go_on, 2, random_models, folder / "one", folder / "again"),
    }


@pytest.mark.parametrize("ranks", ["2 -> 1", "1 -> 2"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(runs: dict, ranks: str, folder: Path) -> None:
    """Adam's moments, its step count and the learning rate all enter the weights. What cannot be read is named."""
    expected = runs["uninterrupted"][0]
    assert expected["metrics"]["actor/lr"] == pytest.approx(1e-2), "step 2 of a warm-up of 2: the peak"
    moved = np.concatenate([(expected["after"][name] - expected["saved"][name]).ravel() for name in expected["saved"]])
    assert 1e-4 < np.abs(moved).mean() < 0.9e-2, "a fresh Adam would move nearly every weight by the rate itself"
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


def test_each_rank_tells_what_it_wrote_or_could_not_write_and_draws_on(runs: dict, folder: Path) -> None:
    written = {name: digest for result in runs["uninterrupted"] for name, digest in result["files"].items()}
    assert written == {path.name: durable_files.digest_file(path) for path in (folder / "two").iterdir()}
    assert set(written) == {".metadata", "__0_0.distcp", "__1_0.distcp", "random_0.pt", "random_1.pt"}
    first, second = (result["drawn"] for result in runs["uninterrupted"])
    assert not set(first) & set(second)
    for result in runs["uninterrupted"]:
        assert result["drawn"] == result["drawn again"]
        no_folder, full = result["failures"]
        says(no_folder, "CheckpointError", "rank 0:")
        assert "File exists" in no_folder or "Not a directory" in no_folder
        says(full, "rank 0:", "rank 1:", "Errno 27")


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


# --- what is in a checkpoint -----------------------------------------------------------------------------------------
def test_a_copy_is_one_of_everything() -> None:
    weights, count = torch.arange(6.0).reshape(2, 3), torch.tensor(2.0)
    state = {"w": weights, "view": weights[1:], "groups": [{"betas": (0.9, 0.999), "step": count}], "n": None}
    copy = copied(state)
    weights.fill_(-1)
    count.add_(1)
    state["groups"].append({})
    assert (copy["w"].tolist(), copy["view"].tolist()) == ([[0, 1, 2], [3, 4, 5]], [[3, 4, 5]])
    assert copy["view"].untyped_storage().nbytes() == 3 * 4, "not the whole that it is a part of"
    assert (copy["groups"], copy["n"]) == ([{"betas": [0.9, 0.999], "step": torch.tensor(2.0)}], None)


def saved_thrice(rank: int, models: dict[str, str], folder: Path, lora: LoraSection) -> dict[str, Any]:
    """What engines say that they will write, before their first step, after it, and after a pass."""
    engines = {name: engine_with_schedule(models[name]) for name in ("tied", "untied", "experts")}
    engines["lora"] = trainable_engine(models["tied"], lora=lora)
    found = {}
    for name, engine in engines.items():
        found[name] = [engine.checkpoint_bytes()]
        step(engine, rank, 2, 0)
        save_engine(engine, folder / name)
        found[name].append(engine.checkpoint_bytes())
        engine.compute_log_probs(random_batch(num_groups=1, n=2), PassLimits("", 2))  # which leaves weights gathered
        found[name].append(engine.checkpoint_bytes())
    return found


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_know_what_they_will_write(ranks: int, random_models: dict[str, str], tmp_path: Path) -> None:
    told = run_ranks(ranks, saved_thrice, random_models, tmp_path, lora())
    assert told[0] == told[-1]
    for name, sizes in told[0].items():
        written = {key: size for key, size in tensor_bytes(tmp_path / name).items() if not key.endswith(".step")}
        assert sizes == [sum(written.values())] * 3, name
        on_disk = sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        assert on_disk > sizes[0]
    moments = [key for key in tensor_bytes(tmp_path / "lora") if "exp_avg_sq" in key]
    assert moments
    assert all("lora_" in key for key in moments), "of the factors alone, beside all weights"


def test_on_other_ranks_no_bit_changes(runs: dict, folder: Path) -> None:
    """Weights, both moments of AdamW and its steps; a tied output layer is there once."""
    assert runs
    first, *others = [all_tensors(folder / name) for name in ("two", "one", "again")]
    assert sum("exp_avg" in name for name in first) == 2 * sum(name.startswith("model.") for name in first)
    assert "model.model.embed_tokens.weight" in first
    assert not [name for name in first if "lm_head" in name]
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


STATE = {"model": {"w": torch.arange(6.0)}, "schedule": {"last_epoch": 3}}


def test_a_malicious_index_is_refused(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    proof = tmp_path / "proof"
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = Malicious(proof)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with refuses(CheckpointError, ".metadata", "posix.system"):
        load_state(STATE, tmp_path)
    assert not proof.exists()
    with pytest.raises(AttributeError):  # torch's own reader runs it, and fails only afterwards
        dcp.FileSystemReader(tmp_path).read_metadata().planner_data.anything  # noqa: B018
    assert proof.exists()


@pytest.mark.parametrize(
    ("index", "parts"),
    [
        *((f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n.".encode(), [name])
          for name in ("torch.load", "torch.hub.load", "builtins.eval", "builtins.getattr")),
        (pickle.dumps({"state_dict_metadata": {}}), ["index", "dict"]),
    ],
    ids=["torch.load", "torch.hub.load", "eval", "getattr", "another kind"],
)  # fmt: skip
def test_an_index_that_names_something_else(tmp_path: Path, index: bytes, parts: list[str]) -> None:
    (tmp_path / ".metadata").write_bytes(index)
    with refuses(CheckpointError, ".metadata", *parts):
        SafeReader(tmp_path).read_metadata()


def test_a_malicious_value_is_refused(tmp_path: Path) -> None:
    """A number's bytes, replaced by a pickle of the same length."""
    proof = tmp_path / "p"
    dcp.save({"number": 0.5, "padding": "x" * 4000}, checkpoint_id=tmp_path, no_dist=True)
    metadata = SafeReader(tmp_path).read_metadata()
    [place] = [info for index, info in metadata.storage_data.items() if index.fqn == "number"]
    bad = io.BytesIO()
    torch.save(Malicious(proof), bad)
    shard = tmp_path / place.relative_path
    data = shard.read_bytes()
    shard.write_bytes(data + bad.getvalue())
    place.offset, place.length = len(data), len(bad.getvalue())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with refuses(CheckpointError, "Weights only"):
        load_state({"number": 0.0, "padding": ""}, tmp_path)
    assert not proof.exists()


# --- files -----------------------------------------------------------------------------------------------------------
def test_a_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"x" * 1_000_003, b"x" * 1_000_002 + b"y"):
        path.write_bytes(content)
        blake2b = hashlib.blake2b(content, digest_size=32).hexdigest()
        assert durable_files.digest_file(path) == durable_files.FileDigest(1_000_003, blake2b)
    with pytest.raises(FileNotFoundError):
        durable_files.digest_file(tmp_path / "nowhere")


def test_every_file_and_folder_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    (tmp_path / "a/b").mkdir(parents=True)
    durable_files.write_durably(tmp_path / "a/b/file", "text")
    assert flushed == [str(tmp_path / "a/b/file")]
    assert (tmp_path / "a/b/file").read_text() == "text"
    flushed.clear()
    durable_files.flush_tree(tmp_path)
    assert sorted(flushed) == [str(tmp_path / part) for part in ("", "a", "a/b", "a/b/file")]
    durable_files.flush_path(tmp_path / "a")
    assert flushed[-1] == str(tmp_path / "a")


def test_room_is_that_of_the_disk_also_for_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder is on the disk of the working directory."""
    with small_disk(tmp_path / "disk", mib=8) as disk:
        assert durable_files.free_bytes(disk) == 8 * MIB
        (disk / "file").write_bytes(bytes(3 * MIB))
        monkeypatch.chdir(disk)
        for folder in (disk, disk / "run" / "huggingface", Path("outputs/run")):
            assert durable_files.free_bytes(folder) == 5 * MIB
            durable_files.require_room(folder, 5 * MIB)
            with refuses(OSError, f"[Errno {errno.ENOSPC}]", f"{6 / 1024:.3g} GiB", f"{5 / 1024:.3g} GiB"):
                durable_files.require_room(folder, 6 * MIB)
        assert sorted(path.name for path in disk.iterdir()) == ["file"]
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_private_files_get_the_mode_of_new_ones(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "sub").mkdir()
        files = [tmp_path / "model.safetensors", tmp_path / "sub" / "part"]
        for file in files:
            file.touch(mode=0o600)
        durable_files.publish_modes(tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}
    assert (tmp_path / "sub").stat().st_mode & 0o777 == 0o777 & ~umask
    assert len(list(tmp_path.rglob("*"))) == 3
