from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.train.micro_batch_plan import (
    ATTENTION_PAIRS,
    PROMPT_DIGEST,
    Lengths,
    balance,
    first_fit,
    group_rows,
    plan_micro_batches,
)
from grpo_dist.protocol import DataProto, Ragged


def lengths(groups: list[int], prompts: list[int], responses: list[int]) -> Lengths:
    return Lengths(np.array(groups), np.array(prompts), np.array(responses))


def random_lengths(num_groups: int, n: int, seed: int = 0) -> Lengths:
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(num_groups), n)
    return Lengths(groups, rng.integers(5, 60, num_groups)[groups], rng.integers(1, 100, num_groups * n))


def plan(
    rows: Lengths, *, size: int = 1, budget: int | None = None, shared: bool = True, ranks_make: int = 0, **more: bool
) -> list:
    limits: dict[str, Any] = {"micro_batch_size": size, "max_token_len": budget, "shared": shared} | more
    return plan_micro_batches(rows, agree=lambda count: max(count, ranks_make), **{"split": True} | limits)


def test_equal_prompts_are_a_group_unless_they_have_other_media() -> None:
    prompts = Ragged.from_rows([[1, 2], [3], [1, 2], [1, 2, 0], [3]], torch.int32)
    assert group_rows(DataProto({"prompts": prompts})).tolist() == [0, 1, 0, 2, 1]
    digests = {PROMPT_DIGEST: np.array(["a cat", "", "a dog", "", ""], dtype=object)}
    assert group_rows(DataProto({"prompts": prompts}, digests)).tolist() == [0, 1, 2, 3, 1]


def test_cost_by_hand() -> None:
    """Prompt 10, responses 4 and 2: 16 tokens; pairs 50 + 4 * 12 + 2 * 11 = 120."""
    rows = lengths([0, 0], [10, 10], [4, 2])
    assert rows.tokens(np.array([0, 1])) == 16
    assert rows.tokens(np.array([0, 1]), shared=False) == 26
    assert rows.cost(np.array([0, 1])) == pytest.approx(16 + 120 / ATTENTION_PAIRS)


def test_first_fit_by_hand() -> None:
    assert first_fit([3, 7, 5, 2, 12], 10) == [[4], [1, 0], [2, 3]]
    assert first_fit([], 10) == []


def test_counts_keep_groups_together() -> None:
    """Groups of 4 into micro-batches of 8; a group of 12 is cut in two parts of 6."""
    rows = lengths([0] * 4 + [1] * 4 + [2] * 12, [5] * 20, [3] * 20)
    found = [sorted(part.tolist()) for part in plan(rows, size=8)]
    assert sorted(found) == [list(range(8)), list(range(8, 14)), list(range(14, 20))]


def test_groups_that_stay_whole() -> None:
    """Three pairs, 13 tokens each, where one sequence or 20 tokens are allowed: a micro-batch each, side by side."""
    rows = lengths([0, 1, 0, 2, 2, 1], [5] * 6, [4] * 6)
    for limit in ({"size": 1}, {"budget": 20}, {"budget": 3}):
        found = plan(rows, split=False, **limit)
        assert sorted(part.tolist() for part in found) == [[0, 2], [1, 5], [3, 4]]
    (one,) = plan(rows, size=6, split=False)
    assert sorted(one.reshape(3, 2).tolist()) == [[0, 2], [1, 5], [3, 4]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("num_groups", "n", "budget"), [(6, 8, 900), (6, 8, 200), (1, 16, 300), (3, 1, 160)])
def test_no_micro_batch_exceeds_the_budget(num_groups: int, n: int, budget: int, shared: bool) -> None:
    rows = random_lengths(num_groups, n)
    found = plan(rows, budget=budget, shared=shared)
    assert sorted(np.concatenate(found).tolist()) == list(range(num_groups * n))
    whole = np.unique(rows.groups, return_counts=True)[1]
    for part in found:
        groups = [part[rows.groups[part] == g] for g in np.unique(rows.groups[part])]
        assert sum(rows.tokens(group, shared=shared) for group in groups) <= budget
        assert budget < 900 or [len(group) for group in groups] == [whole[g] for g in np.unique(rows.groups[part])], (
            "a group that fits is never cut"
        )


def test_a_sequence_over_the_budget_runs_alone() -> None:
    found = plan(lengths([0, 0], [10, 10], [500, 3]), budget=100)
    assert sorted(part.tolist() for part in found) == [[0], [1]]


def test_all_ranks_make_equally_many() -> None:
    rows = random_lengths(4, 4)
    alone = plan(rows, budget=5000)
    found = plan(rows, budget=5000, ranks_make=3)
    assert len(alone) == 1
    assert [len(part) for part in found].count(0) == 0, "spread, rather than two idle micro-batches"
    empty = lengths([], [], [])
    assert [part.tolist() for part in plan(empty, budget=100, ranks_make=2)] == [[], []]
    assert [part.dtype for part in plan(empty, budget=100)] == [np.int64]
    few = plan(random_lengths(1, 1), budget=5000, ranks_make=3)
    assert [len(part) for part in few] == [1, 0, 0]


def uneven_lengths(num_groups: int, n: int) -> Lengths:
    rng = np.random.default_rng(0)
    uids = np.repeat(np.array([f"p{i}" for i in range(num_groups)], dtype=object), n)
    responses = np.sort(rng.exponential(300, num_groups * n).astype(int) + 1)
    return Lengths(uids, np.repeat(rng.integers(5, 300, num_groups), n), responses)


def costs(lengths: Lengths, parts: list[np.ndarray]) -> list[float]:
    """What each part takes; a group's prompt counts in every part that has some of it."""
    return [
        sum(lengths.cost(part[lengths.groups[part] == uid]) for uid in np.unique(lengths.groups[part]))
        for part in parts
    ]


def test_costs_of_micro_batches_are_nearly_equal() -> None:
    found = costs(rows := random_lengths(32, 8), plan(rows, budget=3000))
    assert max(found) / min(found) < 1.1
    assert found == sorted(found, reverse=True)


def test_balance_by_hand() -> None:
    """Groups of 5, 4, 3, 2 and 1 tokens, costliest first to the idlest: 5 2 | 4 3 1."""
    responses = np.array([4, 0, 3, 1, 2])
    parts = balance(Lengths(np.arange(5), np.ones(5, dtype=int), responses), 2)
    assert [part.tolist() for part in parts] == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize(
    ("num_groups", "n", "ranks"), [(32, 8, 2), (32, 8, 4), (1, 8, 4), (3, 4, 2), (0, 4, 2), (2, 1, 3)]
)
def test_every_row_is_on_one_rank(num_groups: int, n: int, ranks: int) -> None:
    parts = balance(uneven_lengths(num_groups, n), ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_groups * n))
    assert all((np.diff(part) > 0).all() for part in parts), "ascending"


def test_groups_stay_whole_where_that_is_even() -> None:
    lengths = uneven_lengths(32, 8)
    parts = balance(lengths, 2)
    groups = [set(lengths.groups[part]) for part in parts]
    assert groups[0].isdisjoint(groups[1])
    found = costs(lengths, parts)
    assert max(found) / min(found) < 1.06
    in_order = costs(lengths, np.split(np.arange(256), 2))
    assert max(in_order) / min(in_order) > 2, "rows cut in their order are not balanced: the check shows nothing"


def test_groups_that_are_too_few_are_cut() -> None:
    """Of three groups two ranks have a whole one and a half each, rather than two against one; of a lone one all."""
    lengths = Lengths(np.repeat(np.arange(3), 4), np.full(12, 10), np.full(12, 50))
    parts = balance(lengths, 2)
    assert sorted(map(len, parts)) == [6, 6]
    found = costs(lengths, parts)
    assert max(found) / min(found) < 1.05
    parts = balance(Lengths(np.zeros(8), np.full(8, 50), np.full(8, 20)), 4)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
