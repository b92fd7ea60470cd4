"""The logarithm of the ratio of two probabilities of a token, bounded so that its exponential stays finite."""

from __future__ import annotations

import torch
from torch import Tensor

# A ratio beyond e^20 is not worth telling apart: the token is all but impossible under one of the two models, and any
# clip range or threshold cuts it.
MAX_LOG_RATIO = 20.0


def bounded_log_ratio(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """The first less the second, element by element, nats; between -20 and 20."""
    return torch.clamp(log_probs - other_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
