import numpy as np
import pytest

from grpo_dist.engines.train.micro_batch_plan import Lengths
from grpo_dist.workers.balance import balance


def random_lengths(num_groups: int, n: int) -> Lengths:
    rng = np.random.default_rng(0)
    uids = np.repeat(np.array([f"p{i}" for i in range(num_groups)], dtype=object), n)
    responses = np.sort(rng.exponential(300, num_groups * n).astype(int) + 1)
    return Lengths(uids, np.repeat(rng.integers(5, 300, num_groups), n), responses)


def costs(lengths: Lengths, parts: list[np.ndarray]) -> list[float]:
    """What each rank computes; a group's prompt counts on every rank that has some of it."""
    return [
        sum(lengths.cost(part[lengths.groups[part] == uid]) for uid in np.unique(lengths.groups[part]))
        for part in parts
    ]


def test_by_hand() -> None:
    """Groups of 5, 4, 3, 2 and 1 tokens, costliest first to the idlest: 5 2 | 4 3 1."""
    responses = np.array([4, 0, 3, 1, 2])
    parts = balance(Lengths(np.arange(5), np.ones(5, dtype=int), responses), 2)
    assert [part.tolist() for part in parts] == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize(
    ("num_groups", "n", "ranks"), [(32, 8, 2), (32, 8, 4), (1, 8, 4), (3, 4, 2), (0, 4, 2), (2, 1, 3)]
)
def test_every_row_once(num_groups: int, n: int, ranks: int) -> None:
    parts = balance(random_lengths(num_groups, n), ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_groups * n))
    assert all((np.diff(part) > 0).all() for part in parts), "ascending"


def test_groups_stay_whole_where_that_is_even() -> None:
    lengths = random_lengths(32, 8)
    parts = balance(lengths, 2)
    groups = [set(lengths.groups[part]) for part in parts]
    assert groups[0].isdisjoint(groups[1])
    found = costs(lengths, parts)
    assert max(found) / min(found) < 1.06
    in_order = costs(lengths, np.split(np.arange(256), 2))
    assert max(in_order) / min(in_order) > 2, "rows cut in their order are not balanced: the check shows nothing"


def test_three_groups_on_two_ranks() -> None:
    """Two whole ones and a half each, rather than two against one."""
    lengths = Lengths(np.repeat(np.arange(3), 4), np.full(12, 10), np.full(12, 50))
    parts = balance(lengths, 2)
    assert sorted(map(len, parts)) == [6, 6]
    found = costs(lengths, parts)
    assert max(found) / min(found) < 1.05


def test_a_lone_group_is_cut() -> None:
    parts = balance(Lengths(np.zeros(8), np.full(8, 50), np.full(8, 20)), 4)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
