"""The reference's output layer, with which the actor computes the exact KL over the whole vocabulary.

A token's reference logits are its last hidden state times the reference's output layer. The reference sends the hidden
states (H numbers a token instead of V logits); the actor keeps a frozen copy of the output layer, and its own head
computes the KL a few tokens at a time (see `lm_head`).
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_dist.engines.train.lm_head import ReferenceHead, why_not_linear
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.errors import ConfigError


def exact_kl_error(why: str) -> ConfigError:
    """The error for a model whose exact KL cannot be computed."""
    return ConfigError(
        f"actor_rollout_ref.actor.kl_loss_type=full: the exact KL needs logits that are the hidden states times the "
        f"output layer, but {why}; choose another KL, such as low_var_kl"
    )


def copy_output_layer(model: Any, device: str, dtype: torch.dtype) -> ReferenceHead:
    """A copy of a model's output layer, gathered from its shards. Collective if the model is sharded.

    Raises:
        ConfigError: the model's logits are not its hidden states times its output layer.
    """
    if why := why_not_linear(model):
        raise exact_kl_error(why)
    head = model.get_output_embeddings()
    weight, bias = (
        None if parameter is None else whole(parameter).detach().clone().to(device, dtype)
        for parameter in (head.weight, getattr(head, "bias", None))
    )
    assert weight is not None
    return ReferenceHead(weight, bias)
