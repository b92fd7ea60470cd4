"""Attention on CPU over the segments of packed rows, one call for each segment.

SDPA under a mask computes every pair of a row, also those that the mask forbids: with n responses to a shared prompt,
n^2 times what one response costs. A segment's queries only ever meet its own keys and its prompt's, so here each
segment gets just those.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one segment.

    Attributes:
        length: how many.
        parent: the run that its tokens see besides their own: its number; -1: none; None: padding, which sees nothing.
        mask: (length, parent's length + length) bool, True where a query (first axis) sees a key; None: causal.
    """

    length: int
    parent: int | None
    mask: Tensor | None = None


def segment_runs(segments: Tensor) -> list[Run]:
    """The runs of all rows of a micro-batch, in order; together they have B * L tokens.

    Args:
        segments: (2, B, L), see `MicroBatch`; negative: padding.
    """
    own, parents = segments.flatten(1).cpu()
    rows = torch.arange(segments.shape[1]).repeat_interleave(segments.shape[2])
    starts = torch.nonzero((own.diff() != 0) | (rows.diff() != 0)).flatten() + 1
    bounds = [0, *starts.tolist(), len(own)]
    number = {int(own[start]): i for i, start in enumerate(bounds[:-1])}
    runs: list[Run] = []
    masks: dict[tuple[int, int], Tensor] = {}
    for start, end in pairwise(bounds):
        segment, parent, length = int(own[start]), int(parents[start]), end - start
        if segment < 0:
            runs.append(Run(length, None))
        elif segment == parent:
            runs.append(Run(length, -1))
        else:
            before = runs[number[parent]].length
            if (length, before) not in masks:
                masks[length, before] = torch.ones(length, before + length, dtype=torch.bool).tril(before)
            runs.append(Run(length, number[parent], masks[length, before]))
    return runs


def segment_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: list[Run] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over runs, SDPA without them; in the form transformers calls: (B, heads, L, D) tensors.

    Returns:
        ((B, L, heads, D), None); zeros on padding.
    """
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    lengths = [run.length for run in segments]
    # (heads, tokens, D) of all rows one after another, cut into runs
    queries, keys, values = (x.transpose(0, 1).flatten(1, 2).split(lengths, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    parts = []
    for i, run in enumerate(segments):
        if run.parent is None:
            parts.append(torch.zeros_like(queries[i]))
            continue
        k, v = keys[i], values[i]
        if run.parent >= 0:
            k, v = torch.cat([keys[run.parent], k], 1), torch.cat([values[run.parent], v], 1)
        q, k, v = (x.unsqueeze(0) for x in (queries[i], k, v))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=run.mask, is_causal=run.mask is None, **options)
        parts.append(found[0])
    out = torch.cat(parts, 1).unflatten(1, (query.shape[0], query.shape[2]))
    return out.permute(1, 2, 0, 3), None
