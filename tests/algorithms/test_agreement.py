"""Which operation differs beyond rounding, on numbers worked out on paper."""

from __future__ import annotations

import pytest
import torch

from grpo_dist.algorithms.agreement import (
    LOG_PROBS,
    SLACK,
    Operation,
    apart,
    distances,
    first_difference,
    most_apart,
    operation,
)


def test_a_token_is_as_far_away_as_its_difference_is_long() -> None:
    trainer = torch.tensor([[3.0, 4.0], [0.0, 10.0], [1.0, 0.0]])
    output = torch.tensor([[3.0, 4.0], [6.0, 2.0], [1.0, 0.5]])
    assert distances("q_proj", output, trainer).tolist() == [0.0, 1.0, 0.5]
    assert distances(LOG_PROBS, torch.tensor([[-2.0]]), torch.tensor([[-4.5]])).tolist() == [2.5], "in nats"
    assert torch.isfinite(distances("q_proj", torch.zeros(1, 2), torch.zeros(1, 2))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_explains_so_many_times_what_a_last_place_does(dtype: torch.dtype) -> None:
    wobbles = torch.tensor([1.0, 3.0], dtype=torch.float64)  # 2 on average
    most = 2 * SLACK[dtype]
    within = operation("q_proj", torch.tensor([0.0, 2 * most], dtype=torch.float64), wobbles, dtype)
    assert (within.largest, within.mean, within.rounding) == (2 * most, most, most)
    assert not within.differs
    assert operation("q_proj", torch.tensor([0.1, 2 * most], dtype=torch.float64), wobbles, dtype).differs
    nan = torch.tensor([0.0, torch.nan], dtype=torch.float64)
    assert operation("q_proj", nan, wobbles, dtype).differs


def test_the_first_one_is_named_if_log_probs_differ() -> None:
    same, other = Operation("a", 1.0, 1.0, 2.0), Operation("b", 3.0, 3.0, 2.0)
    late, log_probs = Operation("c", 9.0, 9.0, 2.0), Operation(LOG_PROBS, 9.0, 9.0, 2.0)
    assert first_difference([same, other, late, log_probs]) is other
    assert first_difference([same, log_probs]) is log_probs
    assert first_difference([same, other, late, Operation(LOG_PROBS, 1.0, 1.0, 2.0)]) is None


def test_log_probs_of_a_batch_are_compared_on_the_tokens_of_the_mask() -> None:
    sampler, trainer = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.5, -2.0, 5.0, -2.5])
    assert apart(sampler, trainer, torch.tensor([True, True, False, True])) == (2 / 3, 1.5, 3)
    assert apart(sampler, sampler, torch.tensor([False, True, False, True]))[:2] == (0, 0)
    for bad in (torch.nan, torch.inf):
        sampler[1] = trainer[1] = bad
        assert apart(sampler, trainer, torch.tensor([True, True, False, True])) == (torch.inf, torch.inf, 1)


def test_a_shorter_type_explains_three_times_what_it_does_to_the_trainer() -> None:
    assert most_apart(None) == (1e-4, 5e-3)
    assert most_apart(0.04) == (0.12, torch.inf), "SmolLM2 in bf16, which is 0.048 apart"
    assert most_apart(0.0) == (5e-3, torch.inf)
