"""What each operation of the trainer's model gives, and what rounding does to it, to compare it with the sampler."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_dist.algorithms.agreement import LOG_PROBS
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.fsdp_model import transformer_layers
from grpo_dist.engines.train.lm_head import ResponseHead
from grpo_dist.engines.train.model_loading import DTYPES
from grpo_dist.protocol import DataProto, Ragged

# Modules that are parts of an operation: the sampler computes them with what follows, or in one product.
_PART = re.compile(r"\b(act_fn|rotary_emb|base_layer|lora_\w+)\b")


def watched(engine: FSDPEngine, data: DataProto, wobble: float = 0.0) -> dict[str, Tensor]:
    """Note what each operation gives in the forward pass of one row.

    Args:
        engine: on one rank; it has made a pass before.
        data: what a forward pass reads of the row, of L tokens, R of them in the response.
        wobble: share of itself by which each number of each output is made larger or smaller, at random, before the
            next operation takes it; 0: none is.

    Returns:
        By the module's name, in the order of computation: (L, F), on CPU; `lm_head` the (R, V) logits at temperature 1,
        `log_probs` (R, 1). `rope.q` and `rope.k` are what enters the attention.
    """
    watch = _Watch(engine.model, int(data["prompts"].lengths.sum() + data["responses"].lengths.sum()), wobble)
    hooks = [
        module.register_forward_hook(functools.partial(watch.note_module, name))
        for name, module in engine.model.named_modules()
        if not _PART.search(name)
    ]
    log_probs = _log_probs(engine, data, hooks, watch.attend)
    return watch.seen | {LOG_PROBS: log_probs.values.unsqueeze(1)}


def log_probs_in(engine: FSDPEngine, data: DataProto, dtype: torch.dtype) -> Ragged:
    """Return the log-probs of `engine.compute_log_probs` by passes in another type.

    Only the attention's kernels, which may have no other, and a float32 output layer compute in their own. The weights
    are those of the engine's own passes, changed layer by layer once FSDP2 has gathered them.
    """
    own = DTYPES[engine.settings.compute_dtype]
    units = {layer: list(layer.modules()) for layer in transformer_layers(engine.model)}
    inside = {module for modules in units.values() for module in modules}
    units[engine.model] = [module for module in engine.model.modules() if module not in inside]
    given: dict[nn.Module, Any] = {}
    weights: dict[nn.Module, list[tuple[nn.Module, dict[str, Any]]]] = {}

    def keep(unit: nn.Module, args: Any, kwargs: Any) -> None:
        given[unit] = args, kwargs

    def enter(unit: nn.Module, *_: Any) -> Any:
        weights[unit] = []
        for module in units[unit]:
            gathered = {name: w for name, w in module._parameters.items() if not isinstance(w, DTensor)}
            weights[unit].append((module, gathered))
            module._parameters.update(_as_type(gathered, dtype))
        return _as_type(given[unit], dtype)  # FSDP2 has rounded them

    def leave(unit: nn.Module, *_: Any) -> None:
        for module, gathered in weights.pop(unit, ()):
            module._parameters.update(gathered)

    def attend(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return _as_type(kernel(*_as_type(args, own), **_as_type(kwargs, own)), dtype)

    hooks = [unit.register_forward_pre_hook(keep, with_kwargs=True, prepend=True) for unit in units]
    hooks += [unit.register_forward_pre_hook(enter, with_kwargs=True) for unit in units]
    hooks += [unit.register_forward_hook(leave, prepend=True, always_call=True) for unit in units]
    return _log_probs(engine, data, hooks, attend)


def _as_type(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)


def _log_probs(engine: FSDPEngine, data: DataProto, hooks: list[Any], attend: Callable[..., Any]) -> Ragged:
    """The log-probs with hooks, which are removed, and `attend` before the attention's kernel, its first argument."""
    kind, compiler = engine.model.config._attn_implementation, engine.forward.compiler
    kernel, was_on = ALL_ATTENTION_FUNCTIONS.get(kind), compiler is not None and compiler.on
    try:
        if kernel is not None:
            AttentionInterface.register(kind, functools.partial(attend, kernel))
        if compiler is not None:
            compiler.on = False  # compiled code calls no hooks
        return engine.compute_log_probs(data, PassLimits("", 1))
    finally:
        for hook in hooks:
            hook.remove()
        if kernel is not None:
            AttentionInterface.register(kind, kernel)
        if compiler is not None:
            compiler.on = was_on


class _Watch:
    def __init__(self, model: Any, length: int, wobble: float) -> None:
        self.length, self.wobble = length, wobble
        self.names = {module: name for name, module in model.named_modules()}
        self.seen: dict[str, Tensor] = {}
        self.random = torch.Generator().manual_seed(0)

    def note(self, name: str, values: Tensor) -> Tensor:
        if self.wobble:
            signs = torch.randint(0, 2, values.shape, generator=self.random).to(values.device) * 2 - 1
            values = (values * (1 + self.wobble * signs)).to(values.dtype)
        self.seen[name] = values.reshape(self.length, -1).to("cpu", copy=True)
        return values

    def note_module(self, name: str, module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(module, ResponseHead):
            assert module.request is not None, "a pass of the engine"
            states = inputs[0].flatten(0, 1)[module.request.predictors]
            self.seen[name] = nn.Linear.forward(module, states.to(module.weight.dtype)).cpu()
            return None
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point() or first.numel() % self.length:
            return None
        noted = self.note(name, first)
        return (noted, *output[1:]) if isinstance(output, tuple) else noted

    def attend(self, kernel: Any, module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = self.names[module]
        query = self.note(f"{name}.rope.q", query.transpose(1, 2)).transpose(1, 2)
        key = self.note(f"{name}.rope.k", key.transpose(1, 2)).transpose(1, 2)
        output, weights = kernel(module, query, key, *args, **kwargs)
        return self.note(f"{name}.attention", output), weights
