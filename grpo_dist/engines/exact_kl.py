"""The exact KL to the reference, over the whole vocabulary, without sending logits between workers.

A token's reference logits are its last hidden state times the reference's output layer. The reference sends the hidden
states (H numbers a token instead of V); the actor keeps a frozen copy of the output layer and computes the KL a few
tokens at a time, forward and backward, so that no second tensor over tokens and vocabulary exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from grpo_dist.algorithms.kl import kl_penalty
from grpo_dist.errors import ConfigError

# Logits in float32 that exist at once for one micro-batch, in numbers (64 MiB).
CHUNK_LOGITS = 1 << 24

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
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            return whole.detach().clone().to(device, dtype)

        return cls(copy(head.weight), copy(getattr(head, "bias", None)))  # type: ignore[arg-type]

    def kl(self, logits: Tensor, response_index: Tensor, hidden: Tensor, temperature: float) -> Tensor:
        """KL(policy || reference) of each response token.

        Args:
            logits: (B, K, V) of the policy; carries the gradient.
            response_index: (B, T), which of the K positions predicts response token t.
            hidden: (B, T, H), the reference's hidden states.
            temperature: logits of both are divided by it.

        Returns:
            (B, T) float32, nats.
        """
        if hidden.dim() == 2:  # the stand-in of a rank that has no rows
            hidden = hidden.unsqueeze(-1).expand(-1, -1, self.weight.shape[1])
        rows = torch.arange(len(logits), device=logits.device).unsqueeze(-1)
        tokens = max(1, CHUNK_LOGITS // (len(logits) * logits.shape[-1]))

        def chunk(index: Tensor, states: Tensor) -> Tensor:
            reference = nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias)
            policy = logits[rows, index].float() / temperature
            return kl_penalty("full", policy, reference.float() / temperature)

        parts = [
            checkpoint(chunk, index, states, use_reentrant=False)
            for index, states in zip(response_index.split(tokens, 1), hidden.split(tokens, 1), strict=True)
        ]
        return torch.cat(parts, dim=1)


@contextlib.contextmanager
def output_layer_input(model: nn.Module, *, enabled: bool) -> Iterator[list[Tensor]]:
    """Collect what the output layer sees, (B, K, H), during the forward passes of the block."""
    seen: list[Tensor] = []
    if not enabled:
        yield seen
        return
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    try:
        yield seen
    finally:
        hook.remove()


def at_responses(states: Tensor, response_index: Tensor) -> Tensor:
    """(B, K, H) at kept positions -> (B, T, H) at response tokens."""
    return states.gather(1, response_index.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
