"""Statistics over the responses to one prompt, without a loop over groups.

Sums are taken in float64: a group of equal float32 rewards then has exactly its reward as mean and 0 as spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        """The same groups on another device."""
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
