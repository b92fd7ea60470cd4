"""What goes to engines, references and exports is the master weights, whatever pass came before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from tests.models import objective, random_batch, random_qwen3, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import model_settings

pytestmark = pytest.mark.deep

SETTINGS = model_settings("", compute_dtype="bf16")


def master_weights(rank: int, path: str) -> dict[str, list[str]]:
    """Names of weights that are not the fp32 ones after a forward-only pass, frozen and trained."""
    ranks, rows = torch.distributed.get_world_size(), random_batch(num_groups=2, n=2)
    frozen = FSDPEngine(replace(SETTINGS, path=path), device="cpu", temperature=1.0)
    trained = trainable_engine(path, dtype="bf16")
    trained.train_mini_batch(rows.index(np.arange(4)[rank::ranks]), micro_batch_size=1, objective=objective())
    found = {}
    for name, engine in (("frozen", frozen), ("trained", trained)):
        before = {key: tensor.clone() for key, tensor in engine.full_parameters("float32")}
        engine.compute_log_probs(rows, micro_batch_size=2)
        after = dict(engine.full_parameters("float32"))
        found[name] = [key for key, tensor in before.items() if not torch.equal(tensor, after[key])]
        rounded = [key for key, tensor in before.items() if torch.equal(tensor, tensor.bfloat16().float())]
        assert not any(key.endswith("q_proj.weight") for key in rounded), "bf16 would show"
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forward_pass_in_bf16_leaves_no_rounded_copies_behind(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(ranks, master_weights, random_qwen3(tmp_path)):
        assert found == {"frozen": [], "trained": []}
