"""Gated delta nets, linear attention that goes from token to token, over the segments of packed rows.

A segment begins with the state behind what it follows, its prompt or the turns before it, and its convolution reads
the last tokens of that; a segment that follows nothing begins with none. So a prompt is computed once for all its
responses. transformers' own functions ignore where sequences begin, and take a state to begin with.

Segments that follow as many others are computed together, in batches of like lengths. Padding behind a segment has a
rate of 0 and no decay, so it leaves the state as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from grpo_dist.engines.train.segment_attention import Run, alike, segment_runs

LINEAR = "linear_attention"
# Functions of a module of transformers that its layers call, with all keywords that a model is given.
_CONVOLVE, _RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


class States(NamedTuple):
    """N segments that are computed together, padded to R tokens.

    Attributes:
        runs: their numbers.
        follows: numbers of the runs that they follow; empty where they follow none.
        tokens: (N, R) int64, which of all tokens; padding repeats a segment's last one.
        real: (N, R) bool, False on padding.
        kept: int64, which of the N * R are real.
    """

    runs: list[int]
    follows: list[int]
    tokens: Tensor
    real: Tensor
    kept: Tensor


class RecurrencePlan:
    """What each token and each segment goes on from; no dataclass and no tuple, see `SegmentPlan`.

    Args:
        before: (T + 1,) int64, the token before each of T = B * L; T for none, and of itself.
        batches: in an order in which what a segment follows comes first.
    """

    def __init__(self, before: Tensor, batches: list[States]) -> None:
        self.before, self.batches = before, batches
        self.followed = {number for batch in batches for number in batch.follows}


def plan_recurrence(segments: Tensor) -> RecurrencePlan:
    """Plan the (2, B, L) `MicroBatch.segments`."""
    runs, count = segment_runs(segments), segments[0].numel()
    before = torch.cat([torch.arange(-1, count - 1), torch.tensor([count])])
    for run in runs:
        last = None if not run.seen else runs[run.seen[-1]]
        before[run.start] = count if last is None else last.start + last.length - 1
    by_depth: dict[int, list[int]] = {}
    for i, run in enumerate(runs):
        if run.seen is not None:
            by_depth.setdefault(len(run.seen), []).append(i)
    batches = [
        _states(members, runs, segments.device)
        for _, depth in sorted(by_depth.items())
        for members in alike(depth, lambda i: runs[i].length)
    ]
    return RecurrencePlan(before.to(segments.device), batches)


def _states(members: list[int], runs: list[Run], device: torch.device) -> States:
    starts, lengths = torch.tensor([(runs[i].start, runs[i].length) for i in members], device=device).T.unsqueeze(-1)
    own = torch.arange(int(lengths.max()), device=device)
    follows = [seen[-1] for i in members if (seen := runs[i].seen)]
    real = own < lengths
    return States(members, follows, starts + torch.minimum(own, lengths - 1), real, real.flatten().nonzero().flatten())


def has_linear_layers(config: Any) -> bool:
    """Tell by a model's config if layers of its language part are linear attention."""
    return LINEAR in (getattr(config.get_text_config(), "layer_types", None) or ())


def computes_segments(model: nn.Module) -> bool:
    """Have a model's linear attention, if it is of gated delta nets, know of segments; returns whether it is."""
    kinds = {type(module) for module in model.modules() if hasattr(module, "conv1d")}
    found = [vars(sys.modules[kind.__module__]) for kind in kinds]
    if not found or not all({_CONVOLVE, _RULE} <= names.keys() for names in found):
        return False
    for names in found:
        for name, of_segments in ((_CONVOLVE, convolved), (_RULE, with_states)):
            if not hasattr(names[name], "plain"):
                names[name] = _or_plain(names[name], of_segments)
    return True


def _or_plain(plain: Callable[..., Any], of_segments: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compute(*args: Any, recurrence: RecurrencePlan | None = None, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if recurrence is None else of_segments(plain, recurrence, *args, **kwargs)

    compute.plain = plain  # type: ignore[attr-defined]
    return compute


@torch.compiler.disable  # type: ignore[misc] # every micro-batch has other segments
def convolved(
    plain: Callable[..., Tensor],
    plan: RecurrencePlan,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """A causal convolution of each channel, (B, C, L) by (C, K), over what each token follows."""
    tokens = F.pad(hidden.transpose(1, 2).flatten(0, 1).to(weight.dtype), (0, 0, 0, 1))  # the last: none
    places = torch.arange(len(tokens), device=hidden.device)
    out = torch.zeros_like(tokens) if bias is None else bias.expand_as(tokens)
    for factor in reversed(weight.unbind(1)):
        out = out + tokens[places] * factor
        places = plan.before[places]
    out = out if activation is None else ACT2FN[activation](out)
    return out[:-1].unflatten(0, (hidden.shape[0], hidden.shape[2])).transpose(1, 2).to(hidden.dtype)


@torch.compiler.disable  # type: ignore[misc]
def with_states(
    plain: Callable[..., tuple[Tensor, Tensor | None]],
    plan: RecurrencePlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule of (B, L, heads, D) tensors, by transformers' function or the kernel in its place."""
    tokens = [x.flatten(0, 1) for x in (query, key, value, g, beta)]
    out, states = value.new_zeros(value.shape).flatten(0, 1), dict[int, Tensor]()
    for runs, follows, places, real, kept in plan.batches:
        q, k, v, decay, rate = (x[places] for x in tokens)
        decay, rate = (x * real.unsqueeze(-1) for x in (decay, rate))
        first = torch.stack([states[number] for number in follows]) if follows else None
        continued = not plan.followed.isdisjoint(runs)
        computed, last = plain(q, k, v, g=decay, beta=rate, initial_state=first, output_final_state=continued, **kwargs)
        out = out.index_copy(0, places.flatten()[kept], computed.flatten(0, 1)[kept].to(out.dtype))
        states |= dict(zip(runs, last, strict=True)) if last is not None else {}
    return out.view(value.shape), None
