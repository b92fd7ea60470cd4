import pickle

import pytest

from grpo_dist.protocol import Max, Mean, Sum, merge_metrics, metric_values


def test_mean_is_weighted_not_an_average_of_averages() -> None:
    """3 tokens of mean 1 and 1 token of 9: 12 / 4, not 5."""
    assert Mean(3.0, 3).merge(Mean(9.0, 1)).value == 3.0


def test_mean_of_nothing_is_zero_and_neutral() -> None:
    assert Mean(0.0, 0).value == 0.0
    assert Mean(0.0, 0).merge(Mean(8.0, 2)).value == 4.0
    assert metric_values({"a": Mean(0.0, 0), "b": Sum(0.0), "c": Mean(0.0, 1)}) == {"b": 0.0, "c": 0.0}, "no number"


def test_sum_and_max() -> None:
    assert Sum(2.0).merge(Sum(-0.5)).value == 1.5
    assert Max(2.0).merge(Max(-7.0)).value == 2.0
    assert Max(-7.0).merge(Max(-2.0)).value == -2.0


def test_merge_by_name_in_any_order() -> None:
    parts = [{"a": Mean(1.0, 1), "loss": Sum(1.0)}, {"a": Mean(6.0, 2)}, {"b": Max(3.0), "loss": Sum(2.0)}]
    expected = {"a": 7 / 3, "loss": 3.0, "b": 3.0}
    assert metric_values(merge_metrics(parts)) == pytest.approx(expected)
    assert metric_values(merge_metrics(reversed(parts))) == pytest.approx(expected)
    assert metric_values(merge_metrics([])) == {}


def test_merge_leaves_its_parts_alone() -> None:
    part = {"a": Mean(1.0, 1)}
    merge_metrics([part, part])
    assert part == {"a": Mean(1.0, 1)}


def test_kinds_do_not_mix() -> None:
    with pytest.raises(AttributeError):
        merge_metrics([{"a": Mean(1.0, 1)}, {"a": Sum(1.0)}])


def test_metrics_cross_processes() -> None:
    assert pickle.loads(pickle.dumps({"a": Mean(1.0, 2), "b": Max(1.0)})) == {"a": Mean(1.0, 2), "b": Max(1.0)}
