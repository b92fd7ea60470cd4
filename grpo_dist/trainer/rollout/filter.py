"""Which groups dynamic sampling keeps (`algorithm.filter_groups`): those whose responses differ."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from grpo_dist.errors import RewardError
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.workers.batch_ref import DataProtoRef


def informative(group: DataProtoRef, metric: str) -> bool:
    """Whether the responses of a group differ in `metric`: `score`, or an extra value of the reward function.

    Responses without the value, such as those that the reward function failed on, are ignored. A group with fewer than
    two values is not informative.
    """
    values = group.small.get(_column(group, metric))
    return values is not None and len(np.unique(values[~np.isnan(values)])) > 1


def require_metric(groups: Collection[DataProtoRef], metric: str) -> None:
    """Check that at least one response has the value that groups are filtered by.

    Raises:
        RewardError: no response has it.
    """
    if any(_column(group, metric) in group.small for group in groups):
        return
    known = dict.fromkeys(key.removeprefix(EXTRA) for group in groups for key in group.small if key.startswith(EXTRA))
    raise RewardError(
        f"algorithm.filter_groups.metric={metric}: no response has it, the reward function returns "
        f"{', '.join(['score', *known])}. Return a dict with {metric!r}, or set algorithm.filter_groups.metric=score"
    )


def _column(group: DataProtoRef, metric: str) -> str:
    return metric if metric in group.small else EXTRA + metric
