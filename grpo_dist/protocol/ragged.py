"""Rows of different lengths without padding: a flat tensor of values, and offsets (as in a CSR matrix)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_dist.errors import BatchError


@dataclass(frozen=True)
class Ragged:
    """N rows of L_i values each.

    Attributes:
        values: (sum L_i,), or (sum L_i, ...) with several numbers per entry; any dtype.
        offsets: (N + 1,) int64; row i is values[offsets[i] : offsets[i + 1]].
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if len(self.offsets) == 0 or int(self.offsets[-1]) != len(self.values):
            raise BatchError(
                f"ragged column: offsets end at {self.offsets[-1:].tolist()}, values at {len(self.values)}"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | np.ndarray | Sequence[float]], dtype: torch.dtype) -> Ragged:
        """Build from a sequence of 1-D rows."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return cls(values, _offsets(torch.tensor([len(t) for t in tensors], dtype=torch.int64)))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """Keep the first `lengths[i]` entries of row i of an (N, T) tensor."""
        mask = torch.arange(padded.shape[1]) < lengths.unsqueeze(-1)
        return cls(padded[mask], _offsets(lengths))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Rows of all parts, in order."""
        return cls(torch.cat([p.values for p in parts]), _offsets(torch.cat([p.lengths for p in parts])))

    @property
    def lengths(self) -> Tensor:
        """Row lengths, (N,) int64."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: np.ndarray | Tensor | slice) -> Ragged:
        index = torch.arange(len(self))[torch.as_tensor(rows) if not isinstance(rows, slice) else rows]
        lengths = self.lengths[index]
        offsets = _offsets(lengths)
        start = torch.repeat_interleave(self.offsets[:-1][index] - offsets[:-1], lengths)
        return Ragged(self.values[start + torch.arange(len(start))], offsets)

    def rows(self) -> list[Tensor]:
        """The rows, as views."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def to_padded(self, padding: float) -> Tensor:
        """An (N, T) or (N, T, H) tensor, right-padded with `padding`; T is the longest row."""
        lengths = self.lengths
        width = int(lengths.max()) if len(lengths) else 0
        padded = torch.full((len(self), width, *self.values.shape[1:]), padding, dtype=self.values.dtype)
        padded[torch.arange(width) < lengths.unsqueeze(-1)] = self.values
        return padded


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
