import pytest
import torch

from grpo_dist.algorithms import agg_loss
from grpo_dist.algorithms.aggregate import LOSS_AGG_MODES
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases, tensors
from tests.messages import refuses

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("case", cases("agg", tuple(set(LOSS_AGG_MODES) - {"prompt-mean"})))
def test_equals_verl(case: dict) -> None:
    scale = case["config"]["loss_scale_factor"]
    loss = agg_loss(**tensors(case["inputs"]), loss_agg_mode=case["name"], loss_scale_factor=scale)
    torch.testing.assert_close(loss, torch.tensor(case["outputs"]["loss"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10),
        ("prompt-mean", (2 + 4) / 2),  # of one response a prompt
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum", 10 / 2),
        ("seq-mean-token-sum-norm", 10 / (2 * 3)),
    ],
)
def test_by_hand(mode: str, expected: float) -> None:
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(expected)


def test_a_mean_over_prompts_by_hand() -> None:
    """Losses 1 and 2, 3, 4 of one prompt's responses, 10 of another's: ((1 + 2 + 3 + 4) / 4 + 10) / 2; and in parts."""
    loss = torch.tensor([[1.0, 9, 9], [2, 3, 4], [10, 9, 9], [9, 9, 9]])
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    weights = mask / torch.tensor([4.0, 4, 1, 1])[:, None]
    assert agg_loss(loss, mask, "prompt-mean", prompt_weights=weights).item() == pytest.approx((10 / 4 + 10) / 2)
    rows = [([i], {"prompt_weights": weights[[i]], "global_prompts": 2}) for i in range(4)]
    parts = [agg_loss(loss[row], mask[row], "prompt-mean", **more).item() for row, more in rows]
    assert parts == pytest.approx([1 / 8, 9 / 8, 5, 0])
    # half of the first prompt alone is in a mini-batch: the mean of what is there
    assert agg_loss(loss[:1], mask[:1], "prompt-mean", prompt_weights=weights[:1]).item() == pytest.approx(1)


def test_the_scale_is_a_constant_not_the_padding() -> None:
    mode = "seq-mean-token-sum-norm"
    assert agg_loss(LOSS, MASK, mode, loss_scale_factor=8).item() == pytest.approx(10 / (2 * 8))
    padded = [torch.nn.functional.pad(values, (0, 5)) for values in (LOSS, MASK)]
    assert agg_loss(*padded, mode, loss_scale_factor=8).item() == pytest.approx(10 / (2 * 8))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_parts_add_up_with_global_counts(mode: str) -> None:
    whole = agg_loss(LOSS, MASK, mode)
    parts = [agg_loss(LOSS[i : i + 1], MASK[i : i + 1], mode, global_tokens=4, global_sequences=2) for i in range(3)]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_masked_infinities_and_empty_batches_are_harmless(mode: str) -> None:
    loss = LOSS.clone()
    loss[2] = float("inf")
    loss[1, 1] = float("nan")
    torch.testing.assert_close(agg_loss(loss, MASK, mode), agg_loss(LOSS, MASK, mode))
    assert agg_loss(loss, torch.zeros_like(MASK), mode).item() == 0


def test_mistakes_are_named() -> None:
    with refuses(ConfigError, "token-median", "token-mean"):
        agg_loss(LOSS, MASK, "token-median")
    with refuses(BatchError, f"loss_mat {tuple(LOSS.shape)}", f"loss_mask {tuple(MASK[:2].shape)}"):
        agg_loss(LOSS, MASK[:2], "token-mean")
