from __future__ import annotations

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.engines.vllm_engine import Response
from grpo_dist.errors import BatchError
from grpo_dist.protocol.fields import FIELDS
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.rollout import SMALL_COLUMNS, group_batch

RESPONSES = [Response([8, 2], [-0.5, -1.5], False, [7, 7]), Response([9, 0, 7], [-1.0, -2.0, -3.0], True, [7, 8, 8])]


def test_group_batch() -> None:
    data = group_batch("p3", np.array([4, 5, 6], np.int32), RESPONSES)
    assert [row.tolist() for row in data["prompts"].rows()] == [[4, 5, 6], [4, 5, 6]]
    assert [row.tolist() for row in data["responses"].rows()] == [[8, 2], [9, 0, 7]]
    assert [row.tolist() for row in data["rollout_log_probs"].rows()] == [[-0.5, -1.5], [-1, -2, -3]]
    assert data["prompt_length"].tolist() == [3, 3]
    assert data["response_length"].tolist() == [2, 3]
    assert data["truncated"].tolist() == [0, 1]
    assert [row.tolist() for row in data["weight_versions"].rows()] == [[7, 7], [7, 8, 8]]
    assert data["weight_version"].tolist() == [7, 7]
    assert data["last_weight_version"].tolist() == [7, 8]
    assert data["uid"].tolist() == ["p3", "p3"]


def test_every_token_trains_end_and_padding_ids_too() -> None:
    data = group_batch("p3", np.array([4], np.int32), RESPONSES)
    assert [row.tolist() for row in data["response_mask"].rows()] == [[1, 1], [1, 1, 1]]


def test_types_follow_the_contract() -> None:
    data = group_batch("p3", np.array([4], np.int32), RESPONSES)
    for name, column in data.batch.items():
        dtype = column.dtype if isinstance(column, torch.Tensor) else column.values.dtype
        assert str(dtype) == f"torch.{FIELDS[name].dtype}", name


def test_no_responses_give_no_rows() -> None:
    assert len(group_batch("p3", np.array([4], np.int32), [])) == 0


@pytest.mark.ray
def test_the_worker_hands_out_a_handle_with_the_small_columns(rollouts: WorkerGroup) -> None:
    prompt = np.array([4, 5, 6], np.int32)
    handle, load = rollouts.call(0, "generate", "generate", "p3", prompt, SamplingSettings(3, 1.0, 1.0, -1, 6, 1))
    assert (load.waiting, len(handle)) == (0, 3)
    assert set(handle.small) == set(SMALL_COLUMNS)
    assert handle["uid"].tolist() == ["p3"] * 3
    assert handle["prompt_length"].tolist() == [3, 3, 3]
    data = handle.fetch(("responses", "prompts"))
    assert data["responses"].lengths.tolist() == handle["response_length"].tolist()
    assert [row.tolist() for row in data["prompts"].rows()] == [[4, 5, 6]] * 3
    with pytest.raises(BatchError, match=r"'old_log_probs' \(made by actor\)"):
        handle.fetch(("old_log_probs",))
