"""The benchmark of checkpoints on a small model: all of it is saved, and read again on every number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoint_ranks import measure, write_model
from benchmarks.checkpoints import QWEN3
from benchmarks.record import table


@pytest.mark.long
def test_a_small_model_is_saved_and_loaded(tmp_path: Path) -> None:
    write_model(tmp_path / "model", QWEN3 | {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 4096})
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size
    saves, loads = measure(tmp_path, count=2, rounds=1)
    assert [row["save"] for row in saves] == ["in the background", "waited for"]
    for row in saves:
        assert 0 < row["blocked"] <= row["whole"]
        assert row["MB"] * 1e6 == pytest.approx(3 * weights, rel=0.05)
        assert 0 < row["before"] <= row["peak"]
    assert [row["ranks"] for row in loads] == [2, 1]
    assert all(row["verify"] > 0 and row["load"] > 0 for row in loads)
    assert "waited for" in table("saves", saves)
