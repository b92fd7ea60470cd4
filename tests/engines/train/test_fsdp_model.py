"""Models whose numbers depend on positions or widths: padding and company change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_model import load_sharded_model
from grpo_dist.protocol import DataProto
from tests.engines.train.plain import built, causal_lm, log_probs_alone
from tests.messages import says
from tests.models import random_batch, random_model
from tests.ranks import LIMIT_S, run_ranks
from tests.worker_settings import model_settings

LAYOUTS = ("padded", "packed", "shared")
ORIGINAL = 24  # no sequence of `short_batch` is that long, every packed or shared row is longer
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 4.0, 9.0, 16.0]  # LongRoPE's factors, for heads of 8


def phi3(folder: Path, short: list[float] = SHORT) -> str:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short, "long_factor": LONG}
    return random_model(
        "Phi3",
        folder,
        max_position_embeddings=1024,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
        sliding_window=None,
        num_key_value_heads=4,
    )


def gpt2(folder: Path) -> str:
    return random_model("GPT2", folder, max_position_embeddings=ORIGINAL)


def short_batch() -> DataProto:
    """16 sequences of at most 8 + 11 tokens."""
    return random_batch(num_groups=2, n=8)


def mixed_batch() -> DataProto:
    """The same with every fourth response made longer than ORIGINAL."""
    data = short_batch()
    rows = [row.tolist() * (5 if i % 4 == 0 else 1) for i, row in enumerate(data["responses"].rows())]
    lengthened = {"responses": rows, "response_mask": [[1] * len(row) for row in rows]}
    kept = data.select(("prompts",))
    return kept.union(DataProto.from_dict({k: type(data[k]).from_rows(v, torch.int32) for k, v in lengthened.items()}))


def alone(path: str, data: DataProto) -> np.ndarray:
    with torch.no_grad():
        return torch.cat(log_probs_alone(causal_lm(path), data)).numpy()


def by_layout(rank: int, path: str, data: DataProto, max_model_len: int | None) -> dict[str, Any]:
    out = {}
    for layout in LAYOUTS:
        engine = built(path, layout=layout, max_model_len=max_model_len)
        found = engine.compute_log_probs(data, PassLimits("", 16)).values.numpy().copy()
        out[layout] = found, engine.forward.layout, engine.forward.report
    return out


@pytest.mark.deep
@pytest.mark.parametrize("family", [phi3, gpt2])
def test_padding_has_positions_that_the_model_knows(family: Any, tmp_path: Path) -> None:
    """Rows are wider than GPT-2's table of positions, and than what Phi-3 takes for a long text."""
    path, data = family(tmp_path), short_batch()
    expected = alone(path, data)
    (found,) = run_ranks(1, by_layout, path, data, None)
    for layout, (log_probs, used, report) in found.items():
        assert used == layout, report
        np.testing.assert_allclose(log_probs, expected, atol=2e-5, err_msg=layout)


def test_longrope_takes_the_samplers_factors_for_all_sequences(tmp_path: Path) -> None:
    """Where sequences may be longer than the original length, short ones get the long factors too, as in vLLM."""
    path, data = phi3(tmp_path / "model"), mixed_batch()
    expected = alone(phi3(tmp_path / "long", short=LONG), data)
    assert np.abs(expected - alone(path, data)).max() > 0.1, "transformers gives short sequences the short ones"
    (found,) = run_ranks(1, by_layout, path, data, 2 * ORIGINAL)
    for layout, (log_probs, used, report) in found.items():
        assert used == layout, report
        np.testing.assert_allclose(log_probs, expected, atol=2e-5, err_msg=layout)


@pytest.mark.deep
def test_sequences_that_change_each_other_go_alone(tmp_path: Path) -> None:
    """Factors that follow the longest sequence of a micro-batch, as transformers has them."""
    path, data = phi3(tmp_path), mixed_batch()
    (found,) = run_ranks(1, by_layout, path, data, None)
    for log_probs, used, report in found.values():
        assert used == "alone", report
        assert report.startswith("one sequence")
        np.testing.assert_allclose(log_probs, alone(path, data), atol=2e-5)


def wide_rows(rank: int, path: str, data: DataProto) -> tuple[np.ndarray, str]:
    engine = built(path)
    embedding = engine.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: out * (2.0 if args[0].shape[1] > 4 * ORIGINAL else 1.0))
    return engine.compute_log_probs(data, PassLimits("", 20)).values.numpy().copy(), engine.forward.report


@pytest.mark.deep
def test_the_check_sees_rows_as_wide_as_they_will_be(tmp_path: Path) -> None:
    """A model that is another one in rows of more than 96 tokens; the few sequences that are compared have fewer."""
    path, data = random_model("Qwen3", tmp_path, head_dim=8), random_batch(num_groups=1, n=20)
    ((found, report),) = run_ranks(1, wide_rows, path, data)
    assert report.startswith("padded sequences")
    says(report, "shared prompts:", "log-probs differ")
    np.testing.assert_allclose(found, alone(path, data), atol=2e-5)


def limits(rank: int, path: str) -> list[float]:
    mesh = next(load_sharded_model(model_settings(path, fsdp_size=2), "cpu").parameters()).device_mesh
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


@pytest.mark.deep
def test_the_ranks_of_a_copy_wait_for_each_other_as_long_as_all_do(random_models: dict[str, str]) -> None:
    """Hybrid sharding makes groups of its own; by torch's default they would wait for half an hour."""
    assert run_ranks(4, limits, random_models["tied"]) == [[LIMIT_S, LIMIT_S]] * 4
