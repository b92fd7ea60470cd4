"""Where two computations of the same tokens part: the first operation whose outputs differ by more than rounding.

How far rounding drives outputs apart depends on the weights, and grows from layer to layer. So it is measured: a third
computation makes each number of each output larger or smaller by one unit in its last place, at random, before the next
operation takes it. With |.| the 2-norm of a token's output,

    difference  d = |sampler - trainer| / |trainer|        of log-probs |sampler - trainer|, in nats
    rounding    r = |wobbled - trainer| / |trainer|        likewise; no operation takes log-probs, so for them it is at
                                                           least half a unit in their last place

and an operation differs where the mean of d over all tokens is above `SLACK` times that of r. Where the log-probs do
not differ no operation is named: whatever differs before them has no effect, or is not the same operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_PROBS = "log_probs"
# Of models that agree, mean d / mean r is up to 1 in float32, at any depth: kernels round within an operation too. In
# shorter types they do that in float32, and it is up to 0.3, or 0.5 where routers choose other experts.
SLACK = {torch.float32: 4.0, torch.bfloat16: 1.5, torch.float16: 1.5}
# Most that log-probs of a batch may be apart in float32, in nats: on average, and those of any token.
MOST, LARGEST = 1e-4, 5e-3


@dataclass(frozen=True)
class Operation:
    """How far the outputs of an operation are apart; `rounding` is the mean that rounding explains."""

    name: str
    largest: float
    mean: float
    rounding: float

    @property
    def differs(self) -> bool:
        """Tell if rounding does not explain it."""
        return not self.mean <= self.rounding


def distances(name: str, output: Tensor, trainer: Tensor) -> Tensor:
    """Return how far each token's output (tokens, F) is from the trainer's: (tokens,) float64, see above."""
    size = trainer.double().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return (output.double() - trainer.double()).norm(dim=1) / (1.0 if name == LOG_PROBS else size)


def roundings(name: str, wobbled: Tensor, trainer: Tensor) -> Tensor:
    """Return what rounding does to each token's output, (tokens,) float64, by that of the wobbled computation."""
    found = distances(name, wobbled, trainer)
    if name != LOG_PROBS:
        return found
    size = trainer[:, 0].abs()
    return found.maximum((torch.nextafter(size, size.new_tensor(torch.inf)) - size).double() / 2)


def operation(name: str, differences: Tensor, wobbles: Tensor, dtype: torch.dtype) -> Operation:
    """Return an operation from all tokens' `distances` of the sampler from the trainer, and their `roundings`."""
    return Operation(name, float(differences.max()), float(differences.mean()), SLACK[dtype] * float(wobbles.mean()))


def apart(sampler: Tensor, trainer: Tensor, mask: Tensor) -> tuple[float, float, int]:
    """Return how far log-probs (T,) are apart on the tokens of a mask: on average, at most, and where that is."""
    differences = (sampler.double() - trainer.double()).abs().nan_to_num(nan=torch.inf)
    return float(differences[mask].mean()), float(differences[mask].max()), int(differences.where(mask, -1.0).argmax())


def most_apart(rounding: float | None) -> tuple[float, float]:
    """Return the most that they may be: in float32 (None), else by what rounding makes of the trainer's, on average."""
    if rounding is None:
        return MOST, LARGEST
    return max(3 * rounding, LARGEST), torch.inf  # tokens may be all but certain; one alone may be far off


def first_difference(operations: Sequence[Operation]) -> Operation | None:
    """Return the first operation that differs, by their order; None if the log-probs, which are the last, do not."""
    if not operations[-1].differs:
        return None
    return next(each for each in operations if each.differs)
