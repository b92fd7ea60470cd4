"""What is in a checkpoint: how many bytes, each weight once, and the same on any number of ranks."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.checkpoint import SafeReader, ShardWriter, copied, load_state, training_state
from grpo_dist.errors import CheckpointError
from tests.engines.train.plain import weights
from tests.engines.train.test_checkpoint import engine_with_schedule, save_engine, step
from tests.messages import refuses
from tests.models import random_batch, trainable_engine
from tests.ranks import run_ranks
from tests.shards import all_tensors, tensor_bytes
from tests.worker_settings import lora


def test_a_copy_is_one_of_everything() -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    state = {
        "w": weights,
        "view": weights[1:],
        "groups": [{"betas": (0.9, 0.999), "step": torch.tensor(2.0)}],
        "n": None,
    }
    copy = copied(state)
    weights.fill_(-1)
    state["groups"][0]["step"].add_(1)
    state["groups"].append({})
    assert copy["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copy["view"].tolist() == [[3, 4, 5]]
    assert copy["view"].untyped_storage().nbytes() == 3 * 4, "not the whole that it is a part of"
    assert copy["groups"] == [{"betas": [0.9, 0.999], "step": torch.tensor(2.0)}]
    assert copy["n"] is None


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


def with_both_names(rank: int, path: str, folder: Path) -> list[dict[str, np.ndarray]]:
    """A checkpoint as earlier versions wrote it, with a tied output layer of its own; and what is read from it."""
    engine = engine_with_schedule(path)
    step(engine, rank, 2, 0)
    state = training_state(engine.model, engine.optimizer, engine.schedule)
    state["model"]["lm_head.weight"] = state["model"]["model.embed_tokens.weight"]
    (writer := ShardWriter()).begin_save(state, folder)
    writer.finished(wait=True)
    again = engine_with_schedule(path)
    again.load_checkpoint(folder)
    return [weights(engine), weights(again)]


@pytest.mark.deep
def test_a_checkpoint_with_both_names_is_read(random_models: dict[str, str], tmp_path: Path) -> None:
    for saved, read in run_ranks(2, with_both_names, random_models["tied"], tmp_path / "earlier"):
        assert "model.lm_head.weight" in tensor_bytes(tmp_path / "earlier")
        for name, weight in saved.items():
            np.testing.assert_array_equal(read[name], weight, err_msg=name)


def resaved(rank: int, path: str, source: Path, target: Path) -> None:
    """A fresh engine that loads, and saves at once."""
    engine = engine_with_schedule(path)
    engine.load_checkpoint(source)
    save_engine(engine, target)


def trained_and_saved(rank: int, path: str, target: Path, ranks: int) -> None:
    engine = engine_with_schedule(path)
    for number in range(2):
        step(engine, rank, ranks, number)
    save_engine(engine, target)


@pytest.mark.deep
def test_from_4_ranks_to_2_to_1_no_bit_changes(random_models: dict[str, str], tmp_path: Path) -> None:
    """Weights, both moments of AdamW and its steps; a tied output layer is there once."""
    path, ranks = random_models["tied"], (4, 2, 1)
    run_ranks(4, trained_and_saved, path, tmp_path / "0", 4)
    for number, count in enumerate(ranks[1:]):
        run_ranks(count, resaved, path, tmp_path / str(number), tmp_path / str(number + 1))
    first, *others = [all_tensors(tmp_path / str(number)) for number in range(len(ranks))]
    assert sum("exp_avg" in name for name in first) == 2 * sum(name.startswith("model.") for name in first)
    assert "model.model.embed_tokens.weight" in first
    assert not [name for name in first if "lm_head" in name]
    for other in others:
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            assert torch.equal(other[name], tensor), name


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
