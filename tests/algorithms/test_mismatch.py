"""How far sampler and trainer are apart: the KL by cause, and the operation that differs beyond rounding; on paper."""

import math
from typing import Any

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
    roundings,
)
from grpo_dist.algorithms.correction import compute_rollout_correction, mismatch_by_cause

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
ROLLOUT = torch.full((2, 4), -1.0)
OLD = ROLLOUT - torch.tensor([[0.1, 0.3, 0.4, 9.0], [0.5, 0.7, 9.0, 9.0]])  # sampler less trainer, nats
SECOND = torch.tensor([False, True])
STALE = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]).bool()
COLUMNS = {"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK}


KEPT = sum(math.exp(-x) for x in (0.1, 0.3, 0.4, 0.5, 0.7)) / 5


@pytest.mark.parametrize(
    ("given", "causes"),
    [
        # of current weights: 0.2 nats in the first sequence, 0.9 / 3 = 0.3 with the second, 2.0 / 5 = 0.4 with all
        ({"is_stale": STALE}, {"rest": 0.3, "old_weights": 0.1}),
        ({"is_stale": STALE, "lacks_routes": SECOND}, {"rest": 0.2, "routes": 0.1, "old_weights": 0.1}),
        (
            {"is_stale": STALE, "filtered": True},
            {"filters": -math.log(KEPT), "rest": 0.3 + math.log(KEPT), "old_weights": 0.1},
        ),
        ({"lacks_routes": SECOND | True}, {"rest": 0, "routes": 0.4}),
        ({"is_stale": STALE | True}, {"rest": 0, "old_weights": 0.4}),
    ],
)
def test_the_kl_by_cause(given: dict[str, Any], causes: dict[str, float]) -> None:
    found = mismatch_by_cause(**COLUMNS, **given)
    assert found == pytest.approx({f"mismatch/{cause}": nats for cause, nats in causes.items()})
    assert sum(found.values()) == pytest.approx(compute_rollout_correction(**COLUMNS)[2]["rollout_corr/kl"])
    assert mismatch_by_cause(**COLUMNS | {"response_mask": MASK * 0}, **given) == {}


# --- by operation -----------------------------------------------------------------------------------------------------
def test_a_token_is_as_far_away_as_its_difference_is_long() -> None:
    trainer = torch.tensor([[3.0, 4.0], [0.0, 10.0], [1.0, 0.0]])
    output = torch.tensor([[3.0, 4.0], [6.0, 2.0], [1.0, 0.5]])
    assert distances("q_proj", output, trainer).tolist() == [0.0, 1.0, 0.5]
    assert distances(LOG_PROBS, torch.tensor([[-2.0]]), torch.tensor([[-4.5]])).tolist() == [2.5], "in nats"
    assert torch.isfinite(distances("q_proj", torch.zeros(1, 2), torch.zeros(1, 2))).all()
    equal = torch.tensor([[-4.5], [-0.75]])
    assert roundings(LOG_PROBS, equal, equal).tolist() == [2**-22, 2**-25], "of numbers that float32 has"
    assert roundings("q_proj", equal, equal).tolist() == [0.0, 0.0]
    assert roundings(LOG_PROBS, equal + 0.25, equal).tolist() == [0.25, 0.25]


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


def test_the_first_one_is_named_if_log_probs_differ_by_more_than_the_type_explains() -> None:
    same, other = Operation("a", 1.0, 1.0, 2.0), Operation("b", 3.0, 3.0, 2.0)
    late, log_probs = Operation("c", 9.0, 9.0, 2.0), Operation(LOG_PROBS, 9.0, 9.0, 2.0)
    assert first_difference([same, other, late, log_probs]) is other
    assert first_difference([same, log_probs]) is log_probs
    assert first_difference([same, other, late, Operation(LOG_PROBS, 1.0, 1.0, 2.0)]) is None
    assert most_apart(None) == (1e-4, 5e-3)
    assert most_apart(0.04) == (0.12, torch.inf), "SmolLM2 in bf16, which is 0.048 apart"
    assert most_apart(0.0) == (5e-3, torch.inf)


def test_log_probs_of_a_batch_are_compared_on_the_tokens_of_the_mask() -> None:
    sampler, trainer = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.5, -2.0, 5.0, -2.5])
    assert apart(sampler, trainer, torch.tensor([True, True, False, True])) == (2 / 3, 1.5, 3)
    assert apart(sampler, sampler, torch.tensor([False, True, False, True]))[:2] == (0, 0)
    for bad in (torch.nan, torch.inf):
        sampler[1] = trainer[1] = bad
        assert apart(sampler, trainer, torch.tensor([True, True, False, True])) == (torch.inf, torch.inf, 1)
