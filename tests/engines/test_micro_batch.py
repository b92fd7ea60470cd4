import numpy as np
import pytest
import torch

from grpo_dist.engines.micro_batch import make_micro_batch, plan_micro_batches
from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Ragged


@pytest.mark.parametrize(("num_rows", "count"), [(7, 3), (7, 7), (2, 5), (0, 3), (1, 1)])
def test_plan_covers_every_row_once_in_a_fixed_count(num_rows: int, count: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, num_rows)
    plan = plan_micro_batches(lengths, count)
    assert len(plan) == count
    assert sorted(np.concatenate(plan).tolist()) == list(range(num_rows))
    assert max(map(len, plan)) - min(map(len, plan)) <= 1
    assert all(rows.dtype == np.int64 for rows in plan)


def test_plan_puts_rows_of_like_length_together() -> None:
    assert [rows.tolist() for rows in plan_micro_batches([3, 90, 4, 80], 2)] == [[1, 3], [2, 0]]


def test_plan_has_at_least_one_micro_batch() -> None:
    """All ranks empty: the collectives still run once."""
    assert [rows.tolist() for rows in plan_micro_batches([], 0)] == [[]]


def two_rows() -> DataProto:
    """Row 0: prompt 11 12 13, response 21 22. Row 1: prompt 14 15, response 23 24 25 26; its second token is masked."""
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[11, 12, 13], [14, 15]], torch.int32),
            "responses": Ragged.from_rows([[21, 22], [23, 24, 25, 26]], torch.int32),
            "response_mask": Ragged.from_rows([[1, 1], [1, 0, 1, 1]], torch.int8),
            "advantages": Ragged.from_rows([[0.5, 0.5], [-1, -1, -1, -1]], torch.float32),
        }
    )


def test_alignment_on_paper() -> None:
    """
    position        0   1   2   3   4   5      kept: 1 (last prompt token of row 1) to 4 (before the last token)
    row 0          11  12  13  21  22  (0)     21 is predicted at 2 = kept[1]
    row 1          14  15  23  24  25  26      23 is predicted at 1 = kept[0]
    """
    batch = make_micro_batch(two_rows(), ("advantages",), padding_id=0)
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 0], [14, 15, 23, 24, 25, 26]]
    assert batch.input_ids.dtype == torch.int64
    assert batch.logit_positions.tolist() == [1, 2, 3, 4]
    assert batch.targets.tolist() == [[13, 21, 22, 0], [23, 24, 25, 26]]
    assert batch.response_index.tolist() == [[1, 2, 3, 3], [0, 1, 2, 3]]
    assert batch.response_mask.tolist() == [[1, 1, 0, 0], [1, 0, 1, 1]]
    assert batch.columns["advantages"].tolist() == [[0.5, 0.5, 0, 0], [-1, -1, -1, -1]]
    responses = batch.targets.gather(1, batch.response_index)
    assert responses[0, :2].tolist() == [21, 22]
    assert responses[1].tolist() == [23, 24, 25, 26]


def test_one_row_keeps_its_own_positions_only() -> None:
    batch = make_micro_batch(two_rows().slice(0, 1), (), padding_id=9)
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22]]
    assert batch.logit_positions.tolist() == [2, 3]
    assert batch.targets.tolist() == [[21, 22]]
    assert batch.response_index.tolist() == [[0, 1]]


def test_padding_follows_the_real_tokens() -> None:
    """Causal attention then needs no mask; the padding id may also be a real token."""
    assert make_micro_batch(two_rows(), (), padding_id=22).input_ids[0].tolist() == [11, 12, 13, 21, 22, 22]
    assert make_micro_batch(two_rows(), (), padding_id=22).response_mask[0].tolist() == [1, 1, 0, 0]


def test_no_rows_give_one_masked_sequence() -> None:
    batch = make_micro_batch(two_rows().slice(0, 0), ("advantages",), padding_id=7)
    assert batch.input_ids.tolist() == [[7, 7]]
    assert batch.response_mask.tolist() == [[0]]
    assert batch.columns["advantages"].tolist() == [[0]]
    assert batch.targets.gather(1, batch.response_index).shape == (1, 1)
    assert make_micro_batch(DataProto(), ("advantages",), padding_id=7).response_mask.tolist() == [[0]]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(BatchError, match="no column 'old_log_probs'"):
        make_micro_batch(two_rows(), ("old_log_probs",), padding_id=0)
