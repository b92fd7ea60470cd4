"""A frozen, sharded model that moves towards another one, and is saved and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.checkpoint import ShardWriter, load_parameters, weights_state
from grpo_dist.engines.fsdp_engine import FSDPEngine
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.errors import CheckpointError
from tests.ranks import run_ranks


def weights(engine: FSDPEngine) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")}


def move(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """A quarter of the way to weights of 2 everywhere; saved; then all the way to 3; read again."""
    engine = FSDPEngine(ModelSettings(path, False, "fp32", "fp32", False, True), device="cpu", temperature=1.0)
    first = weights(engine)
    engine.mix_parameters(((name, torch.full(value.shape, 2.0)) for name, value in first.items()), 0.25)
    mixed = weights(engine)
    head = engine.output_layer("cpu")
    writer = ShardWriter()
    writer.begin_save(weights_state(engine), folder / "ref")
    assert writer.finished(wait=True) is not None
    engine.mix_parameters(((name, torch.full(value.shape, 3.0)) for name, value in first.items()), 1.0)
    replaced = weights(engine)
    load_parameters(engine, folder / "ref")
    try:
        load_parameters(engine, folder / "nowhere")
        message = ""
    except CheckpointError as error:
        message = str(error)
    return {
        "first": first,
        "mixed": mixed,
        "replaced": replaced,
        "read": weights(engine),
        "head": head.weight.numpy(),
        "message": message,
    }


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_two_ranks(random_models: dict[str, str], model: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, move, random_models[model], tmp_path)
    for rank in ranks:
        for name, first in rank["first"].items():
            np.testing.assert_allclose(rank["mixed"][name], 0.75 * first + 0.5, rtol=1e-6, atol=1e-6)
            assert (rank["replaced"][name] == 3).all()
            np.testing.assert_array_equal(rank["read"][name], rank["mixed"][name])
        output = "lm_head.weight" if model == "untied" else "model.embed_tokens.weight"
        np.testing.assert_array_equal(rank["head"], rank["mixed"][output])
        assert "nowhere cannot be read as a checkpoint" in rank["message"]
