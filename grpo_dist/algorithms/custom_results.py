"""What custom estimators and losses must return: looked at as soon as it is there, where its author is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.plugins.registry import Fault, described


def tensor_fault(value: Any, shape: torch.Size, where: Tensor | None = None) -> str:
    """Say how a value differs from a float tensor of this shape with finite numbers; "" if it does not.

    Args:
        value: anything.
        shape: of the tensor.
        where: not 0 at the numbers that matter; None: all do.
    """
    if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
        return described(value)
    bad = ~value.detach().isfinite()
    if where is not None:
        bad &= where.bool()
    if not bad.any():
        return ""
    first = tuple(bad.nonzero()[0].tolist())
    return f"{value[first].item()} at {list(first)} ({int(bad.sum())} such numbers)"


def advantage_fault(returned: Any, batch: Any, config: Mapping[str, Any]) -> Fault | None:
    """Return what is wrong with an advantage estimator's results."""
    shape = batch.response_mask.shape
    expected = f"(advantages, returns), both float tensors of shape {tuple(shape)}, without nan and inf"
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        return described(returned), expected
    for name, value in zip(("advantages", "returns"), returned, strict=True):
        if problem := tensor_fault(value, shape):
            fits_rows = isinstance(value, Tensor) and value.numel() == shape[0]
            remedy = "; batch.on_tokens(numbers) puts a number for each response on its tokens" if fits_rows else ""
            return f"{name} = {problem}", expected + remedy
    return None


def policy_loss_fault(returned: Any, batch: Any, config: Mapping[str, Any]) -> Fault | None:
    """Return what is wrong with a policy loss's results. Where log-probs are not finite, it is not the loss's fault."""
    shape = batch.log_probs.shape
    expected = f"(token losses, metrics), a float tensor of shape {tuple(shape)} and a dict of scalars"
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        return described(returned), expected
    loss, metrics = returned
    finite = all(values.isfinite().all() for values in (batch.log_probs, batch.old_log_probs, batch.advantages))
    if problem := tensor_fault(loss, shape, batch.response_mask if finite else torch.zeros_like(batch.response_mask)):
        return f"token losses = {problem}", f"{expected}, without nan and inf on response_mask"
    if batch.log_probs.requires_grad and not loss.requires_grad:
        return "token losses without a gradient", f"{expected}; compute the losses from batch.log_probs"
    if not isinstance(metrics, Mapping):
        return f"metrics = {described(metrics)}", expected
    for name, value in metrics.items():
        if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
            return f"metrics[{name!r}] = {described(value)}", expected
    return None


def kl_fault(returned: Any, log_probs: Tensor, ref_log_probs: Tensor) -> Fault | None:
    """Return what is wrong with a KL estimator's values. Where log-probs are not finite, it is not its fault."""
    expected = f"a float tensor of shape {tuple(log_probs.shape)}, without nan and inf"
    problem = tensor_fault(returned, log_probs.shape, log_probs.isfinite() & ref_log_probs.isfinite())
    if not problem and log_probs.requires_grad and not returned.requires_grad:
        return "numbers without a gradient", f"{expected}; compute them from log_probs"
    return (problem, expected) if problem else None
