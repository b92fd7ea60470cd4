"""A dynamic loss scale: in float16 small gradients would be 0 in the backward pass, and large ones infinite.

torch's GradScaler has the same rule and constants. But it does not tell whether a gradient was finite, which the
schedule and the metrics here need, and it unscales no gradient but those of a step. The norm of the gradient, which all
ranks have in common, tells; so their scales stay the same without another message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from grpo_dist.engines.train.sharded_tensors import local_shard

START, GROWTH_INTERVAL = 2.0**16, 2000


@dataclass
class LossScale:
    """What losses are multiplied by. It is a power of two, so it rounds nothing.

    Attributes:
        good_steps: optimizer steps since the scale changed.
    """

    value: float = START
    good_steps: int = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        gradients = [local_shard(each.grad) for each in parameters if each.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.value)

    def halve(self) -> bool:
        """Halve the scale after a gradient that is not finite; False: it is too small for that."""
        if self.value < 2:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def count_step(self) -> None:
        """Count an optimizer step, and double the scale after `GROWTH_INTERVAL` of them."""
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0
