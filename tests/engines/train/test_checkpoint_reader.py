"""What somebody has put into a checkpoint is not run."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo_dist.engines.train.checkpoint import load_state
from grpo_dist.engines.train.checkpoint_reader import SafeReader
from grpo_dist.errors import CheckpointError
from tests.messages import refuses

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


def state() -> dict[str, Any]:
    """All that an engine's state has: tensors of several types, also empty ones, nested numbers, texts, tuples."""
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {"w": {"step": torch.tensor(3.0)}}, "groups": {"betas": (0.9, 0.999), "on": True}},
        "schedule": {"last_epoch": 3, "base_lrs": [0.5], "none": None, "name": "x"},
    }


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    saved, read = state(), state()
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    read["model"]["w"].zero_()
    read["optimizer"]["groups"]["betas"], read["schedule"]["last_epoch"] = (0.0, 0.0), 0
    load_state(read, tmp_path)
    assert torch.equal(read["model"]["w"], saved["model"]["w"])
    assert read["model"]["half"].dtype == torch.bfloat16
    assert read["optimizer"]["groups"] == saved["optimizer"]["groups"]
    assert read["schedule"] == saved["schedule"]


def test_a_malicious_index_is_refused(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    proof = tmp_path / "proof"
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = Malicious(proof)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with refuses(CheckpointError, ".metadata", "posix.system"):
        load_state(state(), tmp_path)
    assert not proof.exists()
    with pytest.raises(AttributeError):  # torch's own reader runs it, and fails only afterwards
        dcp.FileSystemReader(tmp_path).read_metadata().planner_data.anything  # noqa: B018
    assert proof.exists()


@pytest.mark.parametrize("name", ["torch.load", "torch.hub.load", "builtins.eval", "builtins.getattr"])
def test_nothing_else_may_be_named(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with refuses(CheckpointError, ".metadata", name):
        SafeReader(tmp_path).read_metadata()


def test_an_index_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with refuses(CheckpointError, ".metadata", "index", "dict"):
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
