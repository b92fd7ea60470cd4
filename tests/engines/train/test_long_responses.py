"""No tensor of a pass grows with the square of a response's length, or with that of its longest neighbour."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.objectives import PolicyObjective
from grpo_dist.protocol import DataProto, Ragged
from tests.models import objective, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.tensor_sizes import largest_tensor

PROMPT = 50


def response_of(length: int) -> DataProto:
    ones = {name: Ragged.from_rows([np.full(length, -1.0)], torch.float32)
            for name in ("old_log_probs", "ref_log_probs", "advantages")}  # fmt: skip
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([np.arange(PROMPT) % 90 + 3], torch.int32),
            "responses": Ragged.from_rows([np.arange(length) % 90 + 3], torch.int32),
            "response_mask": Ragged.from_rows([np.ones(length)], torch.int8),
            **ones,
        }
    )


def largest(rank: int, path: str) -> dict[str, list[tuple[int, int]]]:
    """Of the log-probs, with the comparison of layouts before them, and of an optimizer step; by layout and length."""
    found: dict[str, list[tuple[int, int]]] = {"shared": [], "padded": []}
    for layout, sizes in found.items():
        for length in (700, 1400):
            engine, data = trainable_engine(path, layout=layout, gradient_checkpointing=True), response_of(length)
            log_probs = partial(engine.compute_log_probs, data, PassLimits("", 1))
            step = partial(engine.train_mini_batch, data, objective(), PassLimits("", 1))
            sizes.append((largest_tensor(log_probs), largest_tensor(step)))
            assert engine.forward.report.startswith(
                {"shared": "shared prompts;", "padded": "padded sequences;"}[layout]
            )
    return found


def test_the_largest_tensor_of_a_pass_grows_with_the_length_alone(tmp_path: Path) -> None:
    (found,) = run_ranks(1, largest, random_model("Qwen3", tmp_path, head_dim=8))
    for sizes in found.values():
        for short, long in zip(*sizes, strict=True):
            assert long <= 2.2 * short, "twice the tokens"
            assert long < 1400**2 / 2


def test_a_long_response_does_not_lengthen_its_neighbours() -> None:
    """Counts of a mini-batch: 4,000 tokens and 63 responses of one, of which the last has none that trains."""
    rows = [np.ones(4000), *[np.ones(1)] * 62, np.zeros(1)]
    data = DataProto.from_dict({"response_mask": Ragged.from_rows(rows, torch.int8)})
    trained = PolicyObjective(objective(), None, None)  # type: ignore[arg-type]
    assert trained.counts(data) == [4062.0, 63.0, 0.0, 0.0], "no term divides by prompts or observations"
    assert largest_tensor(lambda: trained.counts(data)) <= 4063
