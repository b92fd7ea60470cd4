"""Comparing what a run has recorded with what is computed again. Whole steps: tests/e2e/test_using_the_model.py."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo_dist.config.load import load_config, readable_config
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.trainer.replay import Difference, first_difference, metric_difference, read_recorded
from tests.messages import refuses

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


def test_metrics_of_the_update() -> None:
    recorded = {"actor/loss": 0.5, "actor/grad_norm": 2.0, "timing_s/step": 1.0}
    assert metric_difference(recorded, {"actor/loss": 0.5, "actor/grad_norm": 2.0, "timing_s/step": 9.0}, 1e-4) is None
    assert metric_difference(recorded, {"actor/grad_norm": 2.1}, 1e-2) == Difference("actor/grad_norm", 2.0, 2.1)


def test_a_run_whose_tokens_were_drafted_is_not_replayed(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    key = f"{rollout}.engine_kwargs.vllm.speculative_config"
    config, _ = load_config([f"{key}={{method: ngram}}", f"{rollout}.deterministic=false"])
    (tmp_path / "config.yaml").write_text(readable_config(config))
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "3.parquet").touch()
    with refuses(ConfigError, tmp_path, key):
        read_recorded(tmp_path, 3)
