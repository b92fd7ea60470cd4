"""Sequence parallelism over attention heads (DeepSpeed-Ulysses, arXiv 2309.14509): long sequences on several ranks.

The ranks of a group hold the same micro-batch. Each computes its slice of the tokens, with all of their layers and
their logits. Only attention needs all tokens: around it the ranks exchange slices, so that each has all tokens of a
share of the heads, and exchange back.

Every rank computes the loss of all tokens, but gradients enter at those of its own slice only. So gradients add up over
ranks as they do where ranks hold different rows, and whoever sums over ranks needs to know of groups only where it
counts rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from grpo_dist.engines.rendezvous import world_limit


class SequenceGroup:
    """Ranks that split the tokens of their micro-batches, `size` consecutive ones; a group of one has all tokens.

    Every rank makes the group at the same time. No dataclass and no tuple, since FSDP2 would copy one for every layer.
    """

    def __init__(self, size: int = 1, device: str = "cpu") -> None:
        self.size, self.rank = size, 0
        self.group: dist.ProcessGroup | None = None
        if size > 1:
            self.group = dist.new_subgroups(size, timeout=world_limit(device))[0]
            self.rank = dist.get_rank(self.group)

    def part(self, tokens: Tensor) -> Tensor:
        """Return this rank's (B, L / size, ...) of (B, L, ...) tokens; L is a multiple of the size."""
        return tokens.chunk(self.size, 1)[self.rank]

    def own(self, predictors: Tensor, length: int) -> tuple[Tensor | slice, Tensor]:
        """Return which response tokens are predicted in this rank's slice, and where.

        Args:
            predictors: (M,) int64, which of the B * L tokens predicts each response token.

        Returns:
            (their numbers among the M; which of the B * L / size tokens of the slice predicts each).
        """
        if self.group is None:
            return slice(None), predictors
        row, column, share = predictors // length, predictors % length, length // self.size
        numbers = torch.nonzero(column // share == self.rank).flatten()
        return numbers, (row * share + column % share)[numbers]

    def whole(self, values: Tensor, numbers: Tensor | slice, count: int) -> Tensor:
        """The values of all `count` response tokens, from those of this rank's slice, through which gradients flow."""
        if isinstance(numbers, slice):
            return values
        everyone = values.new_zeros(count, *values.shape[1:]).index_copy(0, numbers, values.detach())
        dist.all_reduce(everyone, group=self.group)  # each is there once: a sum with zeros, exact in any type
        return everyone.index_copy(0, numbers, values)

    def exchange(self, x: Tensor) -> Tensor:
        """(B, P, Q, D) -> (B, P / size, Q * size, D): a share of the second axis, whole on the third, of all ranks."""
        assert self.group is not None
        parts = x.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        received = wait_tensor(all_to_all_single_autograd(parts, None, None, self.group))
        return received.movedim(0, 2).flatten(2, 3)

    def heads(self, x: Tensor) -> Tensor:
        """(B, heads, L / size, D) of this rank's tokens -> (B, heads / size, L, D) of all tokens.

        Heads of keys and values may be fewer than the ranks; then several ranks get the same one.
        """
        return self.exchange(x.repeat_interleave(max(1, self.size // x.shape[1]), 1))


WHOLE = SequenceGroup()  # of micro-batches that are not split


def over_heads(attend: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """An attention function, in the form transformers calls, that with a `sequence_group` has a share of the heads."""

    @wraps(attend)
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        sequence_group: SequenceGroup | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if sequence_group is None:
            return attend(module, query, key, value, attention_mask, **kwargs)
        kwargs.pop("position_ids", None)  # those of the slice
        if kwargs.get("s_aux") is not None:  # a sink for each head
            kwargs["s_aux"] = kwargs["s_aux"].chunk(sequence_group.size)[sequence_group.rank]
        shares = (sequence_group.heads(x) for x in (query, key, value))
        out, weights = attend(module, *shares, attention_mask, **kwargs)  # (B, L, heads / size, D)
        return sequence_group.exchange(out), weights

    return forward
