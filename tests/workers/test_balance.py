import numpy as np
import pytest

from grpo_dist.workers.balance import balance


def test_by_hand() -> None:
    """Longest first, back and forth: 5, 2, 1 to rank 0 and 4, 3 to rank 1."""
    parts = balance(np.array([5, 1, 4, 2, 3]), 2)
    assert [part.tolist() for part in parts] == [[0, 1, 3], [2, 4]]


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(64, 4), (7, 3), (2, 5), (0, 2), (5, 1)])
def test_every_row_once_and_equal_counts(num_rows: int, num_ranks: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, num_rows)
    parts = balance(lengths, num_ranks)
    assert len(parts) == num_ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all((np.diff(part) > 0).all() for part in parts), "ascending"


def test_tokens_are_nearly_equal() -> None:
    lengths = np.random.default_rng(0).exponential(300, 256).astype(int) + 1
    tokens = [lengths[part].sum() for part in balance(lengths, 4)]
    assert max(tokens) / min(tokens) < 1.05
    in_order = [part.sum() for part in np.split(lengths, 4)]
    assert max(in_order) / min(in_order) > 1.1, "rows cut in their order are not balanced: the check shows nothing"


def test_equal_lengths_keep_a_fixed_order() -> None:
    assert [part.tolist() for part in balance(np.array([3, 3, 3, 3]), 2)] == [[0, 3], [1, 2]]
