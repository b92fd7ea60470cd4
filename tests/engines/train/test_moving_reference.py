"""A frozen, sharded model that moves towards another one, and is saved and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.checkpoint import training_state
from grpo_dist.engines.train.sharded_tensors import whole
from tests.engines.train.plain import built, told, weights
from tests.messages import says
from tests.models import random_batch
from tests.ranks import run_ranks


def move(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """A quarter of the way to weights of 2 everywhere; saved; then all the way to 3; read again."""
    engine = built(path)
    first = weights(engine)
    engine.mix_parameters(((name, torch.full(value.shape, 2.0)) for name, value in first.items()), 0.25)
    mixed = weights(engine)
    head = engine.output_layer("cpu")
    engine.begin_save(folder / "ref")
    assert engine.finished_save(wait=True) is not None
    engine.mix_parameters(((name, torch.full(value.shape, 3.0)) for name, value in first.items()), 1.0)
    replaced = weights(engine)
    engine.load_checkpoint(folder / "ref")
    message = told(engine.load_checkpoint, folder / "nowhere")
    found = {"first": first, "mixed": mixed, "replaced": replaced, "read": weights(engine)}
    return found | {"head": head.weight.numpy(), "message": message}


@pytest.mark.parametrize(("model", "size"), [("tied", 2), ("untied", 2), ("tied", 1)])
def test_it_moves_and_is_read_again(random_models: dict[str, str], model: str, size: int, tmp_path: Path) -> None:
    """On two ranks, and on one, which holds it whole."""
    ranks = run_ranks(size, move, random_models[model], tmp_path)
    for rank in ranks:
        for name, first in rank["first"].items():
            np.testing.assert_allclose(rank["mixed"][name], 0.75 * first + 0.5, rtol=1e-6, atol=1e-6)
            assert (rank["replaced"][name] == 3).all()
            np.testing.assert_array_equal(rank["read"][name], rank["mixed"][name])
        output = "lm_head.weight" if model == "untied" else "model.embed_tokens.weight"
        np.testing.assert_array_equal(rank["head"], rank["mixed"][output])
        says(rank["message"], "CheckpointError", "nowhere", "checkpoint")


def drift(rank: int, path: str) -> dict[str, Any]:
    """A hundred moves by 1 % towards weights 1 % larger, with passes in bf16 between them; then the state is read."""
    found = {}
    for compute in ("bf16", "fp32"):
        engine = built(path, compute_dtype=compute)
        data = random_batch(num_groups=1, n=2)
        goal = {name: torch.from_numpy(1.01 * value) for name, value in weights(engine).items()}
        before = engine.compute_log_probs(data, PassLimits("", 2)).values.numpy().copy()
        for _ in range(100):
            engine.compute_log_probs(data, PassLimits("", 2))
            engine.mix_parameters(goal.items(), 0.01)
        after = engine.compute_log_probs(data, PassLimits("", 2)).values.numpy().copy()
        moved = np.abs(after - before).max()
        state = training_state(engine.model, None, None)["model"]
        saved = {name: whole(tensor).float().numpy().copy() for name, tensor in state.items()}
        found[compute] = saved, moved, {name: target.numpy() for name, target in goal.items()}
    return found


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_small_shares_add_up_in_bf16(ranks: int, random_models: dict[str, str]) -> None:
    """1 - 0.99^100 = 63.4 % of the way, as in fp32; in bf16 each move would be rounded away."""
    for found in run_ranks(ranks, drift, random_models["untied"]):
        for saved, moved, goal in found.values():
            assert moved > 0, "the passes see the moved weights"
            for name, target in goal.items():
                first = target / 1.01
                np.testing.assert_allclose(saved[name], first * (1 + 0.01 * (1 - 0.99**100)), rtol=1e-5, atol=1e-7)


def taken_over(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """A checkpoint of a reference that was held in bf16, read by one that is held in fp32; then a small move."""
    old, new = (built(path, model_dtype=dtype, compute_dtype="bf16") for dtype in ("bf16", "fp32"))
    old.mix_parameters(((name, torch.full(value.shape, 2.0)) for name, value in weights(old).items()), 0.25)
    old.begin_save(folder)
    old.finished_save(wait=True)
    new.load_checkpoint(folder)
    read = weights(new)
    new.mix_parameters(((name, torch.full(value.shape, 3.0)) for name, value in read.items()), 1e-3)
    types = {str(parameter.dtype) for parameter in new.model.parameters()}
    return {"saved": weights(old), "read": read, "moved": weights(new), "types": types}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_in_bf16_is_read_into_fp32(ranks: int, random_models: dict[str, str], tmp_path: Path) -> None:
    for found in run_ranks(ranks, taken_over, random_models["tied"], tmp_path / "ref"):
        assert found["types"] == {"torch.float32"}
        for name, saved in found["saved"].items():
            np.testing.assert_array_equal(found["read"][name], saved)
            expected = 0.999 * saved + 0.003
            np.testing.assert_allclose(found["moved"][name], expected, rtol=1e-6, err_msg="which bf16 would round away")
