"""Comparing what a run has recorded with what is computed again, and what it was before the targets."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.trainer.recorded_step import Difference, Recorded, first_difference

NAN = float("nan")


def batch(scores: list[float], advantages: list[list[float]]) -> DataProto:
    columns = {"score": torch.tensor(scores), "advantages": Ragged.from_rows(advantages, torch.float32)}
    return DataProto.from_dict(columns)


RECORDED = batch([1.0, NAN, 200.0], [[0.5], [], [1.0, 2.0]])


def test_equal_up_to_the_tolerance() -> None:
    """It is relative to numbers above 1: 200.1 differs from 200 by 0.0005 of it."""
    assert first_difference(RECORDED, RECORDED, 0.0) is None
    near = batch([1.0005, NAN, 200.1], [[0.5], [], [1.0, 2.0]])
    assert first_difference(RECORDED, near, 1e-3) is None
    assert first_difference(RECORDED, near, 1e-4) == Difference("score", 1.0, float(torch.tensor(1.0005)), 0)


def test_the_first_one_by_column_row_and_token() -> None:
    other = batch([1.0, NAN, 200.0], [[0.5], [], [1.0, 3.0]])
    assert first_difference(RECORDED, other, 1e-3) == Difference("advantages", 2.0, 3.0, 2, 1)
    both = batch([1.0, NAN, 0.0], [[7.0], [], [1.0, 3.0]])
    assert first_difference(RECORDED, both, 1e-3) == Difference("score", 200.0, 0.0, 2)


def test_a_missing_number_differs() -> None:
    found = first_difference(RECORDED, batch([1.0, 0.0, 200.0], [[0.5], [], [1.0, 2.0]]), 1e-3)
    assert found is not None
    assert (found.name, found.row, found.computed) == ("score", 1, 0.0)


def test_columns_that_the_run_has_not_are_left_out() -> None:
    assert first_difference(RECORDED, DataProto.from_dict({"values": torch.ones(3)}), 0.0) is None


def test_what_was_sampled_is_in_the_mask_whatever_was_left_out_since() -> None:
    """Not what an environment put in, whose tokens no weights have sampled."""
    columns = {
        "weight_versions": Ragged.from_rows([[3, 3], [2, -1, 3]], torch.int32),
        "response_mask": Ragged.from_rows([[0, 0], [1, 0, 0]], torch.int8),
    }
    config = load_config(["trainer.default_local_dir=/nowhere"])[0]
    made = Recorded(Path("/nowhere"), 1, config, DataProto.from_dict(columns), {})
    assert [row.tolist() for row in made.sampled["response_mask"].rows()] == [[1, 1], [1, 0, 1]]
    assert made.data["response_mask"].values.tolist() == [0, 0, 1, 0, 0]
