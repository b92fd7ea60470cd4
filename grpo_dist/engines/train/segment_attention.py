"""Attention on CPU over the segments of packed rows: the short ones in batches, each long one by itself.

SDPA under a mask computes every pair of a row, also those that the mask forbids: with n responses to a shared prompt,
n^2 times what one response costs. A segment's queries only ever meet its own keys and those of the segments that it
follows, its prompt and the turns before it, so here each segment gets just those.

A call of SDPA costs more than a short segment's products, and its kernel is slow in bf16. So short segments of like
lengths are gathered, padded to the longest, and given to it together, in float32 whatever the compute type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Segments of up to so many tokens are batched: beyond, scores leave the cache, where SDPA's kernel keeps its own.
BATCHED_TOKENS = 160
# The shortest in a batch, and its prompt, have at least this share of the longest's tokens, less a few.
LIKE, FEW = 0.8, 4
# A batch has at most so many pairs of tokens, unless one segment has more.
BATCH_PAIRS = 1 << 17
# A long segment that sees a prompt asks with so many queries at a time.
QUERIES = 512
# Columns that queries and keys get for a sink: kernels of GPUs want multiples of eight.
_COLUMNS = 8


class Run(NamedTuple):
    """Consecutive tokens of one segment, the first of which is number `start` of the B * L.

    Attributes:
        seen: numbers of the runs that its tokens see besides their own; None: padding, which sees nothing.
    """

    start: int
    length: int
    seen: tuple[int, ...] | None


@dataclass(frozen=True)
class Batch:
    """N segments, padded to R tokens, with the P tokens that they follow in front of the keys: K = P + R.

    Attributes:
        queries: (N, R) int64, which of all tokens; padding repeats a segment's last one.
        keys: (N, K) int64.
        masks: by sliding window, 0 for none: (N, 1, R, K) float32, 0 where a query sees a key, else -inf. Padding sees
            its own segment.
        real: (N, R) bool, False on padding.
    """

    queries: Tensor
    keys: Tensor
    masks: dict[int, Tensor]
    real: Tensor


class SegmentPlan:
    """Who attends together, for every layer of a forward and backward pass.

    No dataclass and no tuple: FSDP2 would copy one for every layer, with the tensors in it in the compute type.

    Args:
        runs: all runs of a micro-batch, in order; together they have B * L tokens.
        alone: numbers of the runs of long ones, in order.
        masks: by sliding window, 0 for none: (`QUERIES`, K) float32, 0 where a query sees a key, else -inf; of any K
            tokens in a row the last ones are the queries. Without a window it is for the long ones that follow others,
            of which the longest has K tokens with them; within one K are what that many queries see.
    """

    def __init__(self, runs: list[Run], batches: list[Batch], alone: list[int], masks: dict[int, Tensor]) -> None:
        self.runs, self.batches, self.alone, self.masks = runs, batches, alone, masks


def segment_runs(segments: Tensor) -> list[Run]:
    """The runs of all rows of a micro-batch, in order, by its (2, B, L) `MicroBatch.segments`; negative: padding."""
    own, lasts = segments.flatten(1).cpu()
    rows = torch.arange(segments.shape[1]).repeat_interleave(segments.shape[2])
    starts = torch.nonzero((own.diff() != 0) | (rows.diff() != 0)).flatten() + 1
    bounds = [0, *starts.tolist(), len(own)]
    firsts = torch.tensor(bounds[:-1])
    runs: list[Run] = []
    open_runs: list[tuple[int, int]] = []  # that the next one may follow: number, last segment of those that follow it
    for (start, end), segment, last in zip(pairwise(bounds), own[firsts].tolist(), lasts[firsts].tolist(), strict=True):
        while open_runs and open_runs[-1][1] < segment:
            open_runs.pop()
        seen = tuple(number for number, _ in open_runs)
        runs.append(Run(start, end - start, None if segment < 0 else seen))
        if segment >= 0:
            open_runs.append((len(runs) - 1, last))
    return runs


def plan_segments(segments: Tensor, batched_tokens: int = BATCHED_TOKENS, windows: Collection[int] = ()) -> SegmentPlan:
    """Deal the (2, B, L) `MicroBatch.segments` into batches of like lengths; any beyond `batched_tokens` is alone."""
    runs = segment_runs(segments)
    prompts = [sum(runs[number].length for number in run.seen or ()) for run in runs]
    short = [i for i, run in enumerate(runs) if run.seen is not None and run.length <= batched_tokens]
    batches = [
        _batch([runs[i] for i in part], runs, windows)
        for like in alike(short, lambda i: prompts[i])
        for members in alike(like, lambda i: runs[i].length)
        for part in _parts(members, runs[members[0]].length, max(prompts[i] for i in members))
    ]
    alone = [i for i, run in enumerate(runs) if run.seen is not None and run.length > batched_tokens]
    longest = max((runs[i].length + prompts[i] for i in alone if prompts[i]), default=0)
    visible = {0: torch.ones(QUERIES, longest, dtype=torch.bool).tril(longest - QUERIES)}
    for window in windows:
        visible[window] = torch.ones(QUERIES, QUERIES + window - 1, dtype=torch.bool).triu().tril(window - 1)
    return SegmentPlan(runs, batches, alone, {window: _added(seen) for window, seen in visible.items()})


def _added(visible: Tensor) -> Tensor:
    """What SDPA adds to logits, quicker than a bool mask on CPU."""
    return torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)


def segment_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: SegmentPlan | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over segments, SDPA without them; in the form transformers calls: (B, heads, L, D) tensors.

    Returns:
        ((B, L, heads, D), None); zeros on padding.
    """
    if segments is None:
        return padded_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, s_aux=s_aux, **kwargs
        )
    how = Attending(query.shape[-1] ** -0.5 if scaling is None else scaling, s_aux)
    window = sliding_window if sliding_window in segments.masks else 0
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (B * L, heads, D)
    out = value.new_zeros(len(tokens[0]), query.shape[1], value.shape[-1])
    if segments.batches:
        out = _with_short(out, tokens, segments, how, window or 0)
    if segments.alone:
        out = _with_long(out, tokens, segments, how, window or 0)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def padded_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA in the form transformers calls, which knows of attention sinks.

    Args:
        s_aux: (heads,) sinks: a logit more in every softmax, of a key without a value (GPT-OSS).
    """
    if s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    how = Attending(query.shape[-1] ** -0.5 if scaling is None else scaling, s_aux)
    return how(query, key, value, attention_mask).transpose(1, 2).contiguous(), None


class Attending(NamedTuple):
    """How queries and keys meet: a factor of their products, and the sinks of the heads, if there are any."""

    scale: float
    sinks: Tensor | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """SDPA of (N, heads, length, D) tensors; without a mask, as many queries as keys, and causal.

        It does not tell the sum that a sink belongs to, so the sink is one more key in front, of value 0. Columns of
        their own give that key each head's sink as its logit, and leave the others' as they are.
        """
        grouped, causal = q.shape[1] != k.shape[1], mask is None
        if self.sinks is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
        column = (self.sinks.to(q.dtype) / self.scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        first = F.one_hot(torch.tensor(k.shape[-1]), k.shape[-1] + _COLUMNS).to(k).expand(*k.shape[:2], 1, -1)
        q = F.pad(torch.cat([q, column], -1), (0, _COLUMNS - 1, int(causal), 0))  # a first query keeps the order
        k = torch.cat([first, F.pad(k, (0, _COLUMNS))], 2)
        mask = None if mask is None else F.pad(mask, (1, 0), value=float(mask.dtype == torch.bool))
        out = F.scaled_dot_product_attention(
            q,
            k,
            F.pad(v, (0, _COLUMNS, 1, 0)),
            attn_mask=mask,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=grouped,
        )
        return out[:, :, int(causal) :, : v.shape[-1]]


def _with_short(out: Tensor, tokens: list[Tensor], plan: SegmentPlan, attend: Attending, window: int) -> Tensor:
    """Return `out` (tokens, heads, D) with the results in the places of short segments."""
    query, key, value = (x.float() for x in tokens)
    places, results = [], []
    for batch in plan.batches:
        q, k, v = (
            x.index_select(0, seen.flatten()).unflatten(0, seen.shape).transpose(1, 2)
            for x, seen in ((query, batch.queries), (key, batch.keys), (value, batch.keys))
        )
        attended = attend(q, k, v, batch.masks[window]).transpose(1, 2)
        places.append(batch.queries[batch.real])
        results.append(attended[batch.real])
    return out.index_copy(0, torch.cat(places), torch.cat(results).to(out.dtype))


def _with_long(out: Tensor, tokens: list[Tensor], plan: SegmentPlan, attend: Attending, window: int) -> Tensor:
    """`out` (tokens, heads, D), with the results in the places of long segments."""
    lengths = [run.length for run in plan.runs]
    parts = list(out.split(lengths))
    queries, keys, values = (x.split(lengths) for x in tokens)
    for i in plan.alone:
        numbers = (*(plan.runs[i].seen or ()), i)
        k, v = (torch.cat([x[number] for number in numbers]) for x in (keys, values))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries[i], k, v))
        parts[i] = _causal(q, k, v, plan.masks[window], attend, window)[0].transpose(0, 1)
    return torch.cat(parts)


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, attend: Attending, window: int) -> Tensor:
    """(1, heads, R, D) of R queries, the last of the K tokens of keys and values; under a mask few at a time."""
    if q.shape[2] == k.shape[2] and (not window or k.shape[2] <= window):
        return attend(q, k, v, None)
    blocks, seen = [], k.shape[2] - q.shape[2]
    for block in q.split(QUERIES, 2):
        seen += block.shape[2]
        first = max(0, seen - block.shape[2] - window + 1) if window else 0
        visible = mask[-block.shape[2] :, first - seen :]
        blocks.append(attend(block, k[:, :, first:seen], v[:, :, first:seen], visible))
    return torch.cat(blocks, 2)


def alike(members: Iterable[int], length: Callable[[int], int]) -> list[list[int]]:
    """Members whose lengths differ little, the longest first."""
    parts: list[list[int]] = []
    for i in sorted(members, key=length, reverse=True):
        if parts and length(i) >= LIKE * length(parts[-1][0]) - FEW:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _parts(members: list[int], length: int, prompt: int) -> list[list[int]]:
    size = max(1, BATCH_PAIRS // (length * (prompt + length)))
    return [members[start : start + size] for start in range(0, len(members), size)]


def _batch(members: list[Run], runs: list[Run], windows: Collection[int]) -> Batch:
    starts, lengths = torch.tensor([(run.start, run.length) for run in members]).T.unsqueeze(-1)
    before = [_tokens([runs[number] for number in run.seen or ()]) for run in members]
    seen = torch.tensor([len(tokens) for tokens in before]).unsqueeze(-1)
    own, prompt = torch.arange(int(lengths.max())), torch.arange(int(seen.max()))
    queries = starts + torch.minimum(own, lengths - 1)
    keys = nn.utils.rnn.pad_sequence(before, batch_first=True)
    causal = (own.view(-1, 1) >= own).expand(len(members), -1, -1)
    sees = torch.cat([(prompt < seen).unsqueeze(1).expand(-1, len(own), -1), causal], 2)
    positions = torch.cat([prompt - seen, own.expand(len(members), -1)], 1)
    distance = own.view(-1, 1) - positions.unsqueeze(1)
    masks = {window: _added(sees & (distance < window) if window else sees).unsqueeze(1) for window in (0, *windows)}
    return Batch(queries, torch.cat([keys, queries], 1), masks, own < lengths)


def _tokens(runs: list[Run]) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(run.start, run.start + run.length) for run in runs)])
