"""What an advantage estimator is given, statistics of groups, and the registry of estimators.

Every estimator has one signature,

    estimator(batch: AdvantageInputs, config: Mapping[str, Any]) -> (advantages, returns)

with `config` a mapping of verl's option names and both outputs (N, T) float32, 0 off the mask.

Statistics over the responses to one prompt need no loop over groups. Sums are taken in float64: a group of equal
float32 rewards then has exactly its reward as mean and 0 as spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.custom_results import advantage_fault
from grpo_dist.errors import BatchError
from grpo_dist.plugins.registry import Registry

# Keeps the division finite for a group whose rewards are (nearly) all equal; verl's value.
STD_EPS = 1e-6


@dataclass(frozen=True)
class Groups:
    """N responses in G groups.

    Attributes:
        ids: (N,) int64, the group 0..G-1 of each response.
        count: G.
    """

    ids: Tensor
    count: int

    @classmethod
    def of(cls, index: Sequence[Any] | np.ndarray | Tensor) -> Groups:
        """Equal labels form a group; N labels of any hashable kind."""
        if isinstance(index, Tensor):
            ids = torch.unique(index, return_inverse=True)[1]
        else:
            _, inverse = np.unique(np.asarray([str(label) for label in index]), return_inverse=True)
            ids = torch.from_numpy(inverse.astype(np.int64).reshape(-1))
        return cls(ids, int(ids.max()) + 1 if len(ids) else 0)

    def to(self, device: torch.device) -> Groups:
        """Return the groups on another device."""
        return Groups(self.ids.to(device), self.count)

    @property
    def sizes(self) -> Tensor:
        """(N,) float64: how many responses each one's group has."""
        return torch.bincount(self.ids, minlength=self.count).double()[self.ids]

    def sum(self, values: Tensor) -> Tensor:
        """(N,) float64: the sum of (N,) `values` over each one's group."""
        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add_(0, self.ids, values.double())[self.ids]

    def mean(self, values: Tensor) -> Tensor:
        """(N,) float64: the mean over each one's group."""
        return self.sum(values) / self.sizes

    def std(self, values: Tensor) -> Tensor:
        """(N,) float64: the sample standard deviation (ddof 1) over each one's group; 0 for a group of one."""
        deviation = values.double() - self.mean(values)
        return (self.sum(deviation.square()) / (self.sizes - 1).clamp_min(1)).sqrt()

    def normalise(self, values: Tensor, *, by_std: bool) -> Tensor:
        """(N,) float64: value - mean, divided by std + 1e-6 if asked for, within each group."""
        centred = values.double() - self.mean(values)
        return centred / (self.std(values) + STD_EPS) if by_std else centred

    def rank(self, values: Tensor) -> Tensor:
        """(N,) int64: 0 for the largest value of its group, 1 for the next ...; ties in order of appearance."""
        order = torch.argsort(values, descending=True, stable=True)
        order = order[torch.argsort(self.ids[order], stable=True)]
        sizes = torch.bincount(self.ids, minlength=self.count)
        first = (sizes.cumsum(0) - sizes)[self.ids[order]]
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - first
        return rank


Estimator = Callable[..., tuple[Tensor, Tensor]]

ADVANTAGE: Registry[Estimator] = Registry(
    "advantage estimator", "algorithm.adv_estimator", ("batch", "config"), advantage_fault
)


@dataclass(frozen=True)
class AdvantageInputs:
    """A batch of N responses of up to T tokens, right-padded.

    Attributes:
        token_level_rewards: (N, T) float32; an outcome reward sits on the last response token.
        response_mask: (N, T) float32, 1 on the tokens that train.
        optional: what only some estimators need; they ask with `need`.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    optional: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> Tensor:
        """(N,) float64: the summed rewards of each response."""
        return self.token_level_rewards.double().sum(-1)

    @property
    def groups(self) -> Groups:
        """Return the groups: which responses answer the same prompt."""
        return self.need("groups", "index", "compares responses to one prompt and needs their uids")

    def need(self, name: str, argument: str, why: str) -> Any:
        """An optional input.

        Raises:
            BatchError: it was not given.
        """
        value = self.optional.get(name)
        if value is None:
            raise BatchError(f"`{argument}` is missing: the advantage estimator {why}")
        return value

    def on_tokens(self, per_response: Tensor) -> Tensor:
        """(N,) values on every token of their response that trains: (N, T) float32."""
        return per_response.float().unsqueeze(-1) * self.response_mask
