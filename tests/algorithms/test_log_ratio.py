"""Ratios of probabilities, on paper numbers."""

import torch

from grpo_dist.algorithms.log_ratio import bounded_log_ratio


def test_the_ratio_is_bounded_on_both_sides() -> None:
    found = bounded_log_ratio(torch.tensor([-1.0, -50.0, 0.0]), torch.tensor([-3.0, 0.0, -50.0]))
    assert found.tolist() == [2.0, -20.0, 20.0]
    assert found.exp().isfinite().all()
