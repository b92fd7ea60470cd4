"""What the exact KL to the reference, over the whole vocabulary, needs of it without sending logits between workers.

A token's reference logits are its last hidden state times the reference's output layer. The reference sends the hidden
states (H numbers a token instead of V); the actor keeps a frozen copy of the output layer, and its own head computes
the KL a few tokens at a time (see `head`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_dist.engines.sharded import whole
from grpo_dist.errors import ConfigError

# Config entries with which a model does more to its hidden states than one matrix product.
CHANGES_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class ReferenceHead:
    """The reference's output layer.

    Args:
        weight: (V, H).
        bias: (V,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def to(self, device: str) -> ReferenceHead:
        """The same on another device."""
        return ReferenceHead(self.weight.to(device), None if self.bias is None else self.bias.to(device))

    @classmethod
    def of(cls, model: Any, device: str, dtype: torch.dtype) -> ReferenceHead:
        """A copy of a model's output layer, gathered from its shards. Collective if the model is sharded.

        Raises:
            ConfigError: the model changes its logits after the output layer.
        """
        changes = [name for name in CHANGES_LOGITS if getattr(model.config, name, None)]
        if changes:
            raise ConfigError(
                f"actor_rollout_ref.actor.kl_loss_type=full: models with {changes[0]} are not supported; use low_var_kl"
            )
        head = model.get_output_embeddings()

        def copy(parameter: Tensor | None) -> Tensor | None:
            if parameter is None:
                return None
            return whole(parameter).detach().clone().to(device, dtype)

        return cls(copy(head.weight), copy(getattr(head, "bias", None)))  # type: ignore[arg-type]
