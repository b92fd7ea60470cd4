"""The output layer over response tokens only, a few at a time: no tensor over all tokens and the vocabulary exists.

With logits z = W h / temperature and p = softmax(z), for a response token y:

    log_prob = z_y - logsumexp z             d/dz = onehot(y) - p
    entropy  = -sum p log p                  d/dz = -p (log p + entropy)
    KL       = sum p (log p - log q)         d/dz = p (log p - log q - KL)      q: the reference

The backward pass computes each chunk's logits again, except the last chunk's, which it meets first. Softmax, sums
and the gradient of the weights are float32; with `head_dtype=fp32` so are the layer's weights, logits and their
gradient, beside hidden states in bf16. (The idea of Liger Kernel's and torch's linear_cross_entropy, with upstream
gradients per token, entropy and exact KL.)

For the exact KL over the whole vocabulary the reference sends its last hidden states (H numbers a token instead of V
logits), and the actor keeps a frozen copy of the reference's output layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from grpo_dist.assets import POLICY_SECTION
from grpo_dist.engines.float32_products import float32_products
from grpo_dist.engines.train.sharded_tensors import gathered_on, whole
from grpo_dist.errors import ConfigError
from grpo_dist.sizes import CHUNK_LOGITS

# Graphs of one function; torch's own limit, 8, would leave some of LoRA's layers uncompiled. All layers share them.
MOST_VARIANTS = 64
# Config entries with which a model does more to its hidden states than one matrix product.
CHANGES_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Compiler:
    """Compiles functions of a model, and runs them compiled while it is on.

    What it compiles is that of the layers between the points where FSDP2 gathers their weights, so the hooks that do
    this stay outside. All layers of a model share one graph for each of training, passes without gradients, and
    recomputation, and of these for each kind of sizes.

    Attributes:
        unfit: why nothing of the model is compiled; "": nothing is known against it.
    """

    def __init__(self, unfit: str = "") -> None:
        self.on, self.unfit = not unfit, unfit
        self._codes: set[Any] = set()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does as `function`, whose tensors may have other sizes in each call.

        What changes is found out when it changes: told that everything may, the compiler would take the numbers in
        modules that FSDP2 manages, such as the size of a head, for changing ones, and FlexAttention needs to know them.
        """
        torch._dynamo.config.recompile_limit = MOST_VARIANTS  # as an argument it is newer than torch 2.11
        compiled = torch.compile(function)
        self._codes.add(getattr(function, "__func__", function).__code__)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (compiled if self.on else function)(*args, **kwargs)

        return run

    @property
    def variants(self) -> str:
        """How many graphs there are of the function that has most of them, and whether it wanted more."""
        most = max((len(_debug_get_cache_entry_list(code)) for code in self._codes), default=0)
        refused = most >= MOST_VARIANTS
        return f"compiled in {most} variants" + (", and no more: other sizes run uncompiled" if refused else "")


@dataclass(frozen=True)
class ReferenceHead:
    """The reference's output layer: weight (V', H'), bias (V',) or None; a teacher's H' and V' may be above H and V."""

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
        reference_states: (M, H'), the reference's hidden states, or None.
        top: what a teacher tells of its likeliest tokens, in the place of the reference; the KL is over these alone.
        gradient_norms: whether to compute |d log_prob / dz|^2 = 1 - 2 p_y + sum p^2; through it there is no gradient.
    """

    predictors: Tensor
    targets: Tensor
    temperature: float
    entropies: bool = False
    hidden_states: bool = False
    reference: ReferenceHead | None = None
    reference_states: Tensor | None = None
    gradient_norms: bool = False
    top: TopTokens | None = None


class HeadValues(NamedTuple):
    """Of M response tokens float32 log-probs, entropies and exact KL, in nats, (M, H) hidden states, the squared norms
    of the log-prob's gradients, the probability of a teacher's tokens, and the logsumexp; None if not asked for.
    """

    log_probs: Tensor
    entropies: Tensor | None = None
    exact_kl: Tensor | None = None
    hidden_states: Tensor | None = None
    gradient_norms: Tensor | None = None
    mass: Tensor | None = None
    sums: Tensor | None = None

    def part(self, tokens: slice) -> HeadValues:
        """The values of some tokens."""
        return HeadValues._make(None if values is None else values[tokens] for values in self)

    def float(self) -> HeadValues:
        """Some models change the form of their logits (Mamba, OPT); these stay as they are."""
        return self

    def contiguous(self) -> HeadValues:
        """Some models make their logits contiguous; there is nothing to do."""
        return self


class TopTokens(NamedTuple):
    """A teacher's likeliest tokens: ids (tokens, K) int64, and (tokens, K) float32 log-probs over the temperature."""

    ids: Tensor
    log_probs: Tensor

    def part(self, tokens: slice) -> TopTokens:
        """Return those at some tokens."""
        return TopTokens(self.ids[tokens], self.log_probs[tokens])

    def compared(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Return the policy's log-probs among these tokens, (tokens, K), and these less the teacher's among them.

        Both are of distributions over the K tokens alone. `scaled` are the policy's logits over the temperature.
        """
        own = torch.log_softmax(scaled.gather(1, self.ids), -1)
        return own, own - torch.log_softmax(self.log_probs, -1)


class ResponseHead(nn.Linear):
    """A model's output layer that answers a `HeadRequest` instead of giving logits, while one is set.

    It stands in the model where the layer stood, with its parameters under their names. So it runs within the model's
    forward pass, where FSDP has gathered them, and their gradients go where they always went.
    """

    request: HeadRequest | None = None
    chunk_tokens: int | None = None
    compiler: Compiler | None = None

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
            return super().forward(hidden.to(self.weight.dtype))
        return response_values(hidden, self.weight, self.bias, self.request, self.chunk_tokens, self.compiler)


def head_modules(model: Any) -> list[nn.Module]:
    """Return the output layer, behind the embedding if they share their weight."""
    layer, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return [embedding, layer] if embedding.weight is layer.weight else [layer]


def join_float32_head(model: Any, compute: torch.dtype) -> None:
    """Have an output layer in float32 take the hidden states of its model, whose other layers compute in `compute`.

    Raises:
        ConfigError: it shares its weight with an embedding that does more than look up rows: those of another type
            would become other numbers than an engine's.
    """
    *embedding, layer = head_modules(model)
    if embedding and type(embedding[0]) is not nn.Embedding:
        raise ConfigError(
            f"{POLICY_SECTION}.head_dtype=fp32: the output layer of this model shares its weight with a "
            f"{type(embedding[0]).__name__}, which computes with it in the type of the other layers; set it to null"
        )
    if embedding:
        embedding[0].register_forward_hook(lambda module, args, rows: rows.to(compute))
    if not isinstance(layer, ResponseHead):  # which does so chunk by chunk
        layer.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype),))


def why_not_linear(model: Any) -> str:
    """Why a model's logits are not its hidden states times its output layer; "" if they should be."""
    if changes := [name for name in CHANGES_LOGITS if getattr(model.config, name, None)]:
        return f"the model changes its logits after the output layer ({changes[0]})"
    layer = model.get_output_embeddings()
    if hasattr(layer, "lora_A"):
        return "LoRA's factors stand beside its output layer"
    return "" if type(layer) in (nn.Linear, ResponseHead) else f"its output layer is a {type(layer).__name__}"


def token_values(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    reference: Tensor | None,
    *,
    entropies: bool,
    gradient_norms: bool = False,
    top: TopTokens | None = None,
) -> HeadValues:
    """Return the values of tokens.

    Args:
        logits: (tokens, V); left as they are.
        reference: (tokens, V) logits of the reference; None: no KL.
        top: in the place of `reference`: the KL is over these tokens alone, as if there were no others.
    """
    scaled, column = _scaled(logits, temperature), targets.unsqueeze(1)
    log_p = torch.log_softmax(scaled, -1)
    log_probs = log_p.gather(1, column).squeeze(1)
    sums = scaled.gather(1, column).squeeze(1) - log_probs
    entropy = kl = norms = None
    if entropies or gradient_norms or reference is not None:
        p = log_p.exp()
        if gradient_norms:
            norms = 1 - 2 * log_probs.exp() + p.square().sum(1)
        if entropies:
            entropy = -(p * log_p).sum(1)
        if reference is not None:
            kl = (p * log_p.sub_(torch.log_softmax(_scaled(reference, temperature), -1))).sum(1)
    mass = None
    if top is not None:
        own, difference = top.compared(scaled)
        kl, mass = (own.exp() * difference).sum(1), log_p.gather(1, top.ids).exp().sum(1)
    return HeadValues(log_probs, entropy, kl, None, norms, mass, sums)


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    reference: Tensor | None,
    values: HeadValues,
    gradients: HeadValues,
    top: TopTokens | None = None,
) -> Tensor:
    """Return the (tokens, V) gradient of logits divided by the temperature, in their type.

    Args:
        logits: (tokens, V); overwritten if they are float32.
    """
    assert values.sums is not None
    of_top = None
    if top is not None and gradients.exact_kl is not None and values.exact_kl is not None:
        own, difference = top.compared(_scaled(logits, temperature))
        of_top = own.exp() * (difference - values.exact_kl.unsqueeze(1)) * gradients.exact_kl.unsqueeze(1)
    log_p = _scaled(logits, temperature).sub_(values.sums.unsqueeze(1))
    p = log_p.exp() if gradients.entropies is not None or reference is not None else log_p.exp_()
    factor = -gradients.log_probs.unsqueeze(1)
    if gradients.entropies is not None and values.entropies is not None:
        factor = factor - gradients.entropies.unsqueeze(1) * (log_p + values.entropies.unsqueeze(1))
    if reference is not None and gradients.exact_kl is not None and values.exact_kl is not None:
        log_p.sub_(torch.log_softmax(_scaled(reference, temperature), -1)).sub_(values.exact_kl.unsqueeze(1))
        factor = factor + log_p.mul_(gradients.exact_kl.unsqueeze(1))
    grad = p.mul_(factor)
    if torch.compiler.is_compiling():  # in one pass with all the rest
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
        grad = torch.where(is_target, grad + gradients.log_probs.unsqueeze(1), grad)
    else:
        grad.scatter_add_(1, targets.unsqueeze(1), gradients.log_probs.unsqueeze(1))
    if top is not None and of_top is not None:
        grad.scatter_add_(1, top.ids, of_top)
    return grad.to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1 else logits.float() / temperature


def response_values(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    request: HeadRequest,
    chunk_tokens: int | None = None,
    compiler: Compiler | None = None,
) -> HeadValues:
    """Answer a request.

    Args:
        hidden: (B, L, H).
        weight: (V, H).
        chunk_tokens: tokens whose logits exist at once; None: by `CHUNK_LOGITS`.
        compiler: of what is computed from logits; None: nothing is compiled.
    """
    states = hidden.flatten(0, 1)[request.predictors]
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_LOGITS[hidden.device.type] // len(weight))
    used = compiler if compiler is not None and compiler.on else None
    log_probs, entropies, kl, norms, mass = _ChunkedHead.apply(states, weight, bias, request, chunk_tokens, used)
    return HeadValues(log_probs, entropies, kl, states.detach() if request.hidden_states else None, norms, mass)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        request: HeadRequest,
        chunk_tokens: int,
        compiler: Compiler | None,
    ) -> tuple[Tensor | None, ...]:
        compute, temperature = _used(token_values, compiler), _yet_to_divide_by(request, compiler)
        asked = {"entropies": request.entropies, "gradient_norms": request.gradient_norms}
        parts, logits = [], None
        for part in _chunks(len(states), chunk_tokens):
            logits = None  # else two chunks would exist at once
            logits = _logits(states[part], weight, bias, request, compiler)
            reference = _reference_logits(request, part, len(weight), compiler)
            top = None if request.top is None else request.top.part(part)
            parts.append(compute(logits, request.targets[part], temperature, reference, top=top, **asked))
        values = HeadValues._make(None if of[0] is None else torch.cat(of) for of in zip(*parts, strict=True))
        ctx.save_for_backward(states, weight, bias, *values)
        ctx.request, ctx.chunk_tokens, ctx.compiler = request, chunk_tokens, compiler
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        constant = values.gradient_norms, values.mass
        ctx.mark_non_differentiable(*(column for column in constant if column is not None))
        return values.log_probs, values.entropies, values.exact_kl, *constant

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (states, weight, bias, *saved), request, compiler = ctx.saved_tensors, ctx.request, ctx.compiler
        values, gradients = HeadValues._make(saved), HeadValues(*grads[:3])
        compute, temperature = _used(logits_gradient, compiler), _yet_to_divide_by(request, compiler)
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for part in reversed(_chunks(len(states), ctx.chunk_tokens)):
            logits, ctx.last_logits = ctx.last_logits, None
            if logits is None:
                logits = _logits(states[part], weight, bias, request, compiler)
            reference = _reference_logits(request, part, len(weight), compiler)
            of_chunk = values.part(part), gradients.part(part)
            top = None if request.top is None else request.top.part(part)
            grad = compute(logits, request.targets[part], temperature, reference, *of_chunk, top).to(weight.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            with float32_products(states):
                grad_states[part] = grad @ weight
                if grad_weight is not None:
                    _add_outer(grad_weight, grad, states[part].to(grad.dtype))
            del logits, reference, grad  # else they would exist beside the next chunk
        results = []
        for total, like in ((grad_states, states), (grad_weight, weight), (grad_bias, bias)):
            scaled = total if total is None or request.temperature == 1 else total.div_(request.temperature)
            results.append(None if scaled is None else scaled.to(like.dtype))
        return *results, None, None, None


def _chunks(length: int, size: int) -> list[slice]:
    """Cut so many tokens into parts; of none there is one, empty."""
    return [slice(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


@cache
def _used(function: Callable[..., Any], compiler: Compiler | None) -> Callable[..., Any]:
    return function if compiler is None else compiler(function)


def _yet_to_divide_by(request: HeadRequest, compiler: Compiler | None) -> float:
    """Return what remains to be done to logits of `_logits`; compiled code divides on its way."""
    return 1.0 if compiler is None else request.temperature


def _logits(
    states: Tensor, weight: Tensor, bias: Tensor | None, request: HeadRequest, compiler: Compiler | None
) -> Tensor:
    """Return a chunk's logits (tokens, V) for compiled code; else in float32, divided by the temperature."""
    with float32_products(states):
        logits = nn.functional.linear(states.to(weight.dtype), weight, bias)
    if compiler is None:
        logits = logits.float() if request.temperature == 1 else logits.float().div_(request.temperature)
    return logits


def _reference_logits(request: HeadRequest, part: slice, vocabulary: int, compiler: Compiler | None) -> Tensor | None:
    """Return `_logits` of the reference for the policy's tokens: a teacher's output layer may have rows of padding."""
    head, states = request.reference, request.reference_states
    if head is None:
        return None
    assert states is not None
    weight, bias = head.weight[:vocabulary], None if head.bias is None else head.bias[:vocabulary]
    return _logits(states[part], weight, bias, request, compiler)


def _add_outer(total: Tensor, grad: Tensor, states: Tensor) -> None:
    """Add gradᵀ states to (V, H) `total`, in float32."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), states)
    elif grad.is_cuda:  # without a product in bfloat16 between
        torch.addmm(total, grad.t(), states, out_dtype=torch.float32, out=total)
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
        None if parameter is None else whole(parameter.detach(), gathered_on(model)).clone().to(device, dtype)
        for parameter in (head.weight, getattr(head, "bias", None))
    )
    assert weight is not None
    return ReferenceHead(weight, bias)
