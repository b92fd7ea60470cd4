import pytest
import torch

from grpo_dist.engines.train.attention import dense_mask, varlen_inputs
from grpo_dist.engines.train.micro_batch import MicroBatch, make_micro_batch
from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Ragged
from tests.messages import refuses


def three_rows() -> DataProto:
    """Rows 0 and 2 answer prompt 11 12 13, row 1 answers 14 15; the second token of row 1 is masked."""
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[11, 12, 13], [14, 15], [11, 12, 13]], torch.int32),
            "responses": Ragged.from_rows([[21, 22], [23, 24, 25, 26], [27]], torch.int32),
            "response_mask": Ragged.from_rows([[1, 1], [1, 0, 1, 1], [1]], torch.int8),
            "advantages": Ragged.from_rows([[0.5, 0.5], [-1, -1, -1, -1], [2]], torch.float32),
        }
    )


def pairs(batch: MicroBatch) -> list[tuple[int, int]]:
    """(token that predicts, token predicted), by id."""
    return list(zip(batch.input_ids.flatten()[batch.predictors].tolist(), batch.targets.tolist(), strict=True))


PAIRS = {(13, 21), (21, 22), (15, 23), (23, 24), (24, 25), (25, 26), (13, 27)}


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_each_response_token_is_predicted_by_the_token_before_it(layout: str) -> None:
    batch = make_micro_batch(three_rows(), ("advantages",), padding_id=0, layout=layout)
    assert set(pairs(batch)) == PAIRS
    assert len(pairs(batch)) == len(PAIRS)
    assert batch.response_mask.tolist() == [[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]]
    assert batch.columns["advantages"].tolist() == [[0.5, 0.5, 0, 0], [-1, -1, -1, -1], [2, 0, 0, 0]]
    assert batch.to_rows(batch.targets).tolist() == [[21, 22, 0, 0], [23, 24, 25, 26], [27, 0, 0, 0]]
    assert batch.input_ids.dtype == torch.int64


def test_padded_on_paper() -> None:
    batch = make_micro_batch(three_rows(), (), padding_id=9, layout="padded")
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 9], [14, 15, 23, 24, 25, 26], [11, 12, 13, 27, 9, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert batch.segments is None, "padding follows the real tokens: causal attention needs no mask"


def test_packed_on_paper() -> None:
    """Longest first; 6 tokens, then 5 and 4 side by side in a row of 9."""
    batch = make_micro_batch(three_rows(), (), padding_id=0, layout="packed", row_width=9)
    assert batch.input_ids.tolist() == [[14, 15, 23, 24, 25, 26, 0, 0, 0], [11, 12, 13, 21, 22, 11, 12, 13, 27]]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0], "of padding: 0"
    one = make_micro_batch(three_rows(), (), padding_id=0, layout="packed", row_width=15)
    assert one.input_ids.shape == (1, 15), "no padding"


def test_shared_on_paper() -> None:
    """Rows 0 and 2 are [11 12 13 | 21 22 | 27]: 27 sees the prompt and itself."""
    batch = make_micro_batch(three_rows(), (), padding_id=0, layout="shared")
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 27], [14, 15, 23, 24, 25, 26]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 2, 3, 4, 5]]
    assert batch.segments is not None
    assert dense_mask(batch.segments)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_groups_side_by_side_do_not_see_each_other() -> None:
    batch = make_micro_batch(three_rows(), (), padding_id=0, layout="shared", row_width=20)
    assert batch.input_ids.shape == (1, 12)
    mask = dense_mask(batch.segments)[0, 0]  # type: ignore[arg-type]
    assert not mask[6:, :6].any()
    assert mask.diagonal().all(), "every token sees itself, so that no softmax is empty"


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_wider_than_its_sequences(layout: str) -> None:
    """All in one row, as on GPU, and padding behind them at position 0; padded rows are as long as the longest."""
    batch = make_micro_batch(three_rows(), (), padding_id=0, layout=layout, row_width=40, min_width=40)
    if layout == "padded":
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
        return
    assert batch.position_ids.shape == (1, 40)
    assert not batch.position_ids[0, 15:].any()
    assert batch.position_ids.max() == 5
    assert set(pairs(batch)) == PAIRS
    if layout == "packed":
        starts = varlen_inputs(batch.position_ids)["cu_seq_lens_q"].tolist()
        assert starts == [0, 6, 11, *range(15, 41)], "each padding token is a sequence of its own"


def test_gradients_flow_back_to_the_tokens() -> None:
    batch = make_micro_batch(three_rows(), (), padding_id=0)
    values = torch.arange(7.0, requires_grad=True)
    (batch.to_rows(values) * batch.response_mask).sum().backward()
    assert values.grad is not None
    masked = batch.targets == 24
    assert values.grad.tolist() == (~masked).float().tolist()


def test_rows_that_ranks_split_are_a_multiple_of_them() -> None:
    """15 tokens become 16 for 4 ranks; padded rows stay as long as the longest sequence, since they are not split."""
    packed, padded = (make_micro_batch(three_rows(), (), 0, layout=each, row_width=15, multiple=4)
                      for each in ("packed", "padded"))  # fmt: skip
    assert packed.input_ids.shape == (1, 16)
    assert set(pairs(packed)) == PAIRS
    assert padded.input_ids.shape == (3, 6)
    empty = make_micro_batch(DataProto(), (), 0, layout="packed", multiple=4)
    assert empty.input_ids.shape == (1, 8)
    assert empty.segments is not None
    assert make_micro_batch(DataProto(), (), 0, layout="padded", multiple=4).segments is None


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_no_rows_give_one_masked_sequence(layout: str) -> None:
    batch = make_micro_batch(three_rows().slice(0, 0), ("advantages",), padding_id=7, layout=layout)
    assert batch.input_ids.tolist() == [[7, 7]]
    assert batch.response_mask.tolist() == [[0]]
    assert batch.columns["advantages"].tolist() == [[0]]
    assert batch.to_rows(torch.ones(1)).shape == (1, 1)
    assert make_micro_batch(DataProto(), ("advantages",), padding_id=7).response_mask.tolist() == [[0]]


def test_a_missing_column_is_named() -> None:
    with refuses(BatchError, "'old_log_probs'"):
        make_micro_batch(three_rows(), ("old_log_probs",), padding_id=0)
