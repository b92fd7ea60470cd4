"""Metric values that merge correctly across micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """The mean `sum / count`. Merging adds sums and counts, so it never averages averages."""

    sum: float
    count: float

    def merge(self, other: Mean) -> Mean:
        """Mean over both."""
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; 0 if `count` is 0."""
        return self.sum / self.count if self.count else 0.0


@dataclass(frozen=True)
class Sum:
    """A total."""

    value: float

    def merge(self, other: Sum) -> Sum:
        """The sum of both."""
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """A maximum."""

    value: float

    def merge(self, other: Max) -> Max:
        """The larger of both."""
        return Max(max(self.value, other.value))


Metric = Mean | Sum | Max
"""A number of a worker that knows how it merges with those of others."""


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge metric dicts of micro-batches or ranks by name."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics as plain floats, without the means of nothing."""
    return {name: m.value for name, m in metrics.items() if not isinstance(m, Mean) or m.count}
