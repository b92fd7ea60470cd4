"""The output layer over response tokens only, a few at a time: no tensor over all tokens and the vocabulary exists.

With logits z = W h / temperature and p = softmax(z), for a response token y:

    log_prob = z_y - logsumexp z             d/dz = onehot(y) - p
    entropy  = -sum p log p                  d/dz = -p (log p + entropy)
    KL       = sum p (log p - log q)         d/dz = p (log p - log q - KL)      q: the reference

The backward pass computes each chunk's logits again, except the last chunk's, which it meets first. Softmax, sums
and the gradient of the weights are float32. (The idea of Liger Kernel's and torch's linear_cross_entropy, with upstream
gradients per token, entropy and exact KL.)

For the exact KL over the whole vocabulary the reference sends its last hidden states (H numbers a token instead of V
logits), and the actor keeps a frozen copy of the reference's output layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.errors import ConfigError
from grpo_dist.sizes import CHUNK_LOGITS

# Config entries with which a model does more to its hidden states than one matrix product.
CHANGES_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True)
class ReferenceHead:
    """The reference's output layer: weight (V', H'), and bias (V',) or None. A teacher's hidden size H' may be another
    than the policy's H, and V' above the policy's V.
    """

    weight: Tensor
    bias: Tensor | None

    def to(self, device: str) -> ReferenceHead:
        """Return this layer on another device."""
        return ReferenceHead(self.weight.to(device), None if self.bias is None else self.bias.to(device))


@dataclass(frozen=True)
class HeadRequest:
    """The values that the head computes for M response tokens.

    Attributes:
        predictors: (M,) int64, which of the B * L tokens predicts each.
        targets: (M,) int64, the response tokens.
        temperature: logits are divided by it.
        entropies: whether to compute entropies.
        hidden_states: whether to return the predictors' hidden states, detached.
        reference: the reference's output layer, for the exact KL, or None.
        reference_states: (M, H'), the reference's hidden states, or None.
    """

    predictors: Tensor
    targets: Tensor
    temperature: float
    entropies: bool = False
    hidden_states: bool = False
    reference: ReferenceHead | None = None
    reference_states: Tensor | None = None


class HeadValues(NamedTuple):
    """(M,) float32 log-probs, entropies and exact KL, in nats, and (M, H) hidden states; None if not asked for."""

    log_probs: Tensor
    entropies: Tensor | None
    exact_kl: Tensor | None
    hidden_states: Tensor | None


class ResponseHead(nn.Linear):
    """A model's output layer that answers a `HeadRequest` instead of giving logits, while one is set.

    It stands in the model where the layer stood, with its parameters under their names. So it runs within the model's
    forward pass, where FSDP has gathered them, and their gradients go where they always went.
    """

    request: HeadRequest | None = None
    chunk_tokens: int | None = None

    @classmethod
    def install(cls, model: Any) -> ResponseHead | None:
        """Put it in the place of the model's output layer; None if the model does more to its logits."""
        if why_not_linear(model):
            return None
        layer = model.get_output_embeddings()
        head = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        head.weight, head.bias = layer.weight, layer.bias
        model.set_output_embeddings(head)
        return head

    @contextmanager
    def answering(self, request: HeadRequest) -> Iterator[None]:
        """Within the block, the model's `logits` are `HeadValues`."""
        self.request = request
        try:
            yield
        finally:
            self.request = None

    def forward(self, hidden: Tensor) -> Any:
        """Logits (B, L, V) of hidden states (B, L, H), or what `request` asks for."""
        if self.request is None:
            return super().forward(hidden)
        return response_values(hidden, self.weight, self.bias, self.request, self.chunk_tokens)


def why_not_linear(model: Any) -> str:
    """Why a model's logits are not its hidden states times its output layer; "" if they should be."""
    if changes := [name for name in CHANGES_LOGITS if getattr(model.config, name, None)]:
        return f"the model changes its logits after the output layer ({changes[0]})"
    layer = model.get_output_embeddings()
    if hasattr(layer, "lora_A"):
        return "LoRA's factors stand beside its output layer"
    return "" if type(layer) in (nn.Linear, ResponseHead) else f"its output layer is a {type(layer).__name__}"


def response_values(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, request: HeadRequest, chunk_tokens: int | None = None
) -> HeadValues:
    """Answer a request.

    Args:
        hidden: (B, L, H).
        weight: (V, H).
        bias: (V,) or None.
        request: what for.
        chunk_tokens: tokens whose logits exist at once; None: by `CHUNK_LOGITS`.
    """
    states = hidden.flatten(0, 1)[request.predictors]
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_LOGITS[hidden.device.type] // len(weight))
    log_probs, entropies, kl = _ChunkedHead.apply(states, weight, bias, request, chunk_tokens)
    return HeadValues(
        log_probs,
        entropies if request.entropies else None,
        kl if request.reference is not None else None,
        states.detach() if request.hidden_states else None,
    )


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, request: HeadRequest, chunk_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs, entropies, kl = (torch.zeros(len(states), device=states.device) for _ in range(3))
        log_p = None
        for part in _chunks(len(states), chunk_tokens):
            log_p = None  # else two chunks would exist at once
            log_p = _log_softmax(states[part], weight, bias, request.temperature)
            log_probs[part] = log_p.gather(1, request.targets[part].unsqueeze(1)).squeeze(1)
            if request.entropies or request.reference is not None:
                p = log_p.exp()
                entropies[part] = -(p * log_p).sum(1)
                if request.reference is not None:
                    kl[part] = (p * log_p.sub_(_reference_log_softmax(request, part, len(weight)))).sum(1)
        ctx.save_for_backward(states, weight, bias, entropies, kl)
        ctx.request, ctx.chunk_tokens = request, chunk_tokens
        kept = any(ctx.needs_input_grad) and request.reference is None  # with a reference, log_p has been overwritten
        ctx.last_log_p = log_p if kept else None
        return log_probs, entropies, kl

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor, grad_kl: Tensor
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, _, _ = ctx.saved_tensors
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for part in reversed(_chunks(len(states), ctx.chunk_tokens)):
            grad = _logits_gradient(ctx, part, grad_log_probs[part], grad_entropies[part], grad_kl[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            grad_states[part] = grad @ weight
            if grad_weight is not None:
                _add_outer(grad_weight, grad, states[part])
            del grad  # else it would exist beside the next chunk
        return (
            grad_states,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _logits_gradient(ctx: Any, part: slice, grad_log_probs: Tensor, grad_entropies: Tensor, grad_kl: Tensor) -> Tensor:
    """(tokens, V) float32 gradient of a chunk's logits, of (tokens,) gradients of what was computed from them."""
    states, weight, bias, entropies, kl = ctx.saved_tensors
    request: HeadRequest = ctx.request
    log_p, ctx.last_log_p = ctx.last_log_p, None
    if log_p is None:
        log_p = _log_softmax(states[part], weight, bias, request.temperature)
    needs_log_p = request.entropies or request.reference is not None
    p = log_p.exp() if needs_log_p else log_p.exp_()
    factor = -grad_log_probs.unsqueeze(1)
    if request.entropies:
        factor = factor - grad_entropies.unsqueeze(1) * (log_p + entropies[part].unsqueeze(1))
    if request.reference is not None:
        difference = log_p.sub_(_reference_log_softmax(request, part, len(weight))).sub_(kl[part].unsqueeze(1))
        factor = factor + difference.mul_(grad_kl.unsqueeze(1))
    grad = p.mul_(factor)
    grad.scatter_add_(1, request.targets[part].unsqueeze(1), grad_log_probs.unsqueeze(1))
    return grad.div_(request.temperature) if request.temperature != 1 else grad


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _log_softmax(states: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = nn.functional.linear(states, weight, bias).float()
    if temperature != 1:
        logits.div_(temperature)
    return torch.log_softmax(logits, -1)


def _reference_log_softmax(request: HeadRequest, part: slice, vocabulary: int) -> Tensor:
    """(tokens, vocabulary): among the policy's tokens; the output layer of a teacher may have more rows of padding."""
    head, states = request.reference, request.reference_states
    assert head is not None
    assert states is not None
    weight, bias = head.weight[:vocabulary], None if head.bias is None else head.bias[:vocabulary]
    return _log_softmax(states[part].to(weight.dtype), weight, bias, request.temperature)


def _add_outer(total: Tensor, grad: Tensor, states: Tensor) -> None:
    """Add gradᵀ states to (V, H) `total`, in float32."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), states)
    else:
        total += grad.t() @ states


def exact_kl_error(why: str) -> ConfigError:
    """The error for a model whose exact KL cannot be computed."""
    return ConfigError(
        f"actor_rollout_ref.actor.kl_loss_type=full: the exact KL needs logits that are the hidden states times the "
        f"output layer, but {why}; choose another KL, such as low_var_kl"
    )


def copy_output_layer(model: Any, device: str, dtype: torch.dtype) -> ReferenceHead:
    """A copy of a model's output layer, gathered from its shards. Collective if the model is sharded."""
    if why := why_not_linear(model):
        raise exact_kl_error(why)
    head = model.get_output_embeddings()
    weight, bias = (
        None if parameter is None else whole(parameter).detach().clone().to(device, dtype)
        for parameter in (head.weight, getattr(head, "bias", None))
    )
    assert weight is not None
    return ReferenceHead(weight, bias)
