"""The output layer over response tokens only, a few at a time: no tensor over all tokens and the vocabulary exists.

With logits z = W h / temperature and p = softmax(z), for a response token y:

    log_prob = z_y - logsumexp z             d/dz = onehot(y) - p
    entropy  = -sum p log p                  d/dz = -p (log p + entropy)
    KL       = sum p (log p - log q)         d/dz = p (log p - log q - KL)      q: the reference

The backward pass computes each chunk's logits again, except the last chunk's, which it meets first. Softmax, sums
and the gradient of the weights are float32. (The idea of Liger Kernel's and torch's linear_cross_entropy, with upstream
gradients per token, entropy and exact KL.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_dist.engines.exact_kl import CHANGES_LOGITS, ReferenceHead

# Logits of a chunk, in numbers: 64 MiB of float32 on CPU, 512 MiB on GPU, where large matrices pay.
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}


@dataclass(frozen=True)
class HeadRequest:
    """What the head computes for M response tokens.

    Attributes:
        predictors: (M,) int64, which of the B * L tokens predicts each.
        targets: (M,) int64, the response tokens.
        temperature: logits are divided by it.
        entropies: whether to compute entropies.
        hidden_states: whether to return the predictors' hidden states, detached.
        reference: the reference's output layer, for the exact KL, or None.
        reference_states: (M, H), the reference's hidden states, or None.
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
        layer = model.get_output_embeddings()
        if type(layer) is not nn.Linear or any(getattr(model.config, name, None) for name in CHANGES_LOGITS):
            return None
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
            log_p = _log_softmax(states[part], weight, bias, request.temperature)
            log_probs[part] = log_p.gather(1, request.targets[part].unsqueeze(1)).squeeze(1)
            if request.entropies or request.reference is not None:
                p = log_p.exp()
                entropies[part] = -(p * log_p).sum(1)
                if request.reference is not None:
                    kl[part] = (p * log_p.sub_(_reference_log_softmax(request, part))).sum(1)
        ctx.save_for_backward(states, weight, bias, entropies, kl)
        ctx.request, ctx.chunk_tokens = request, chunk_tokens
        kept = any(ctx.needs_input_grad) and request.reference is None  # with a reference, log_p has been overwritten
        ctx.last_log_p = log_p if kept else None
        return log_probs, entropies, kl

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor, grad_kl: Tensor
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, entropies, kl = ctx.saved_tensors
        request: HeadRequest = ctx.request
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        log_p, ctx.last_log_p = ctx.last_log_p, None
        for part in reversed(_chunks(len(states), ctx.chunk_tokens)):
            if log_p is None:
                log_p = _log_softmax(states[part], weight, bias, request.temperature)
            p = log_p.exp()
            factor = -grad_log_probs[part].unsqueeze(1)
            if request.entropies:
                factor = factor - grad_entropies[part].unsqueeze(1) * (log_p + entropies[part].unsqueeze(1))
            if request.reference is not None:
                difference = log_p.sub_(_reference_log_softmax(request, part)).sub_(kl[part].unsqueeze(1))
                factor = factor + difference.mul_(grad_kl[part].unsqueeze(1))
            grad = p.mul_(factor)
            grad.scatter_add_(1, request.targets[part].unsqueeze(1), grad_log_probs[part].unsqueeze(1))
            if request.temperature != 1:
                grad.div_(request.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            grad_states[part] = grad @ weight
            if grad_weight is not None:
                _add_outer(grad_weight, grad, states[part])
            log_p = None
        return (
            grad_states,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _log_softmax(states: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = nn.functional.linear(states, weight, bias).float()
    if temperature != 1:
        logits.div_(temperature)
    return torch.log_softmax(logits, -1)


def _reference_log_softmax(request: HeadRequest, part: slice) -> Tensor:
    head, states = request.reference, request.reference_states
    assert head is not None
    assert states is not None
    return _log_softmax(states[part].to(head.weight.dtype), head.weight, head.bias, request.temperature)


def _add_outer(total: Tensor, grad: Tensor, states: Tensor) -> None:
    """Add gradᵀ states to (V, H) `total`, in float32."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), states)
    else:
        total += grad.t() @ states
