"""Rows of a batch as padded tensors for one forward pass.

A sequence is its prompt followed by its response, padded on the right. Padding comes after every real token, so a
causal model never attends to it and needs no attention mask. Padding stays in this file and its callers: what enters
and leaves an engine is ragged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_dist.protocol import DataProto, Ragged


@dataclass(frozen=True)
class MicroBatch:
    """B sequences for one forward pass; K logit positions are kept, T is the longest response.

    Attributes:
        input_ids: (B, L) int64.
        logit_positions: (K,) int64, positions of the sequence whose logits predict some response token.
        targets: (B, K) int64, the token that follows each kept position.
        response_index: (B, T) int64, which of the K positions predicts response token t.
        response_mask: (B, T) float32, 1 on response tokens that train.
        columns: per-token columns of the batch, padded to (B, T), or (B, T, H).
    """

    input_ids: Tensor
    logit_positions: Tensor
    targets: Tensor
    response_index: Tensor
    response_mask: Tensor
    columns: dict[str, Tensor]

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return MicroBatch(**moved, columns={name: value.to(device) for name, value in self.columns.items()})


def plan_micro_batches(lengths: Sequence[int] | np.ndarray, count: int) -> list[np.ndarray]:
    """Cut rows into `count` micro-batches of nearly equal row counts, rows of like length together.

    Args:
        lengths: tokens of each row.
        count: how many micro-batches to make: the same on all ranks, or their collectives would not match. A rank
            with fewer rows gets empty ones.

    Returns:
        Row indices of each micro-batch. Every row appears once.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    return [np.asarray(part, dtype=np.int64) for part in np.array_split(order, max(count, 1))]


def make_micro_batch(data: DataProto, columns: Sequence[str], padding_id: int) -> MicroBatch:
    """Pad the rows of `data`, which has `prompts`, `responses`, `response_mask` and the ragged `columns`.

    An empty `data` gives one sequence of two padding tokens whose mask is 0: a rank without rows still takes part in
    the collectives of the forward and backward pass.
    """
    if len(data) == 0:
        return _empty_micro_batch(columns, padding_id)
    prompts, responses = data["prompts"], data["responses"]
    prompt_lengths, response_lengths = prompts.lengths, responses.lengths
    rows = [torch.cat(pair) for pair in zip(prompts.rows(), responses.rows(), strict=True)]
    input_ids = Ragged.from_rows(rows, torch.int64).to_padded(padding_id)
    first = int(prompt_lengths.min()) - 1  # the last prompt token predicts the first response token
    last = int((prompt_lengths + response_lengths).max()) - 1
    positions = torch.arange(first, last)
    offsets = torch.arange(int(response_lengths.max()))
    return MicroBatch(
        input_ids=input_ids,
        logit_positions=positions,
        targets=input_ids[:, first + 1 : last + 1],
        response_index=((prompt_lengths - 1 - first).unsqueeze(-1) + offsets).clamp_max(len(positions) - 1),
        response_mask=data["response_mask"].to_padded(0).float(),
        columns={name: data[name].to_padded(0.0) for name in columns},
    )


def _empty_micro_batch(columns: Sequence[str], padding_id: int) -> MicroBatch:
    one = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch(
        input_ids=torch.full((1, 2), padding_id, dtype=torch.int64),
        logit_positions=torch.zeros(1, dtype=torch.int64),
        targets=one,
        response_index=one,
        response_mask=torch.zeros(1, 1),
        columns={name: torch.zeros(1, 1) for name in columns},
    )
