"""What each operation of the trainer's model gives, and what rounding does to it, to compare it with the sampler."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_dist.algorithms.agreement import LOG_PROBS
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.lm_head import ResponseHead
from grpo_dist.protocol import DataProto

# Modules that are parts of an operation: the sampler computes them with what follows, or in one product.
_PART = re.compile(r"\b(act_fn|rotary_emb|base_layer|lora_\w+)\b")


def watched(engine: FSDPEngine, data: DataProto, wobble: float = 0.0) -> dict[str, Tensor]:
    """Note what each operation gives in the forward pass of one row.

    Args:
        engine: on one rank; it has made a pass before.
        data: `SEQUENCE_COLUMNS` of the row, of L tokens, R of them in the response.
        wobble: share of itself by which each number of each output is made larger or smaller, at random, before the
            next operation takes it; 0: none is.

    Returns:
        By the module's name, in the order of computation: (L, F), on CPU; `lm_head` the (R, V) logits at temperature 1,
        `log_probs` (R, 1). `rope.q` and `rope.k` are what enters the attention.
    """
    watch = _Watch(engine.model, int(data["prompts"].lengths.sum() + data["responses"].lengths.sum()), wobble)
    kind, compiler = engine.model.config._attn_implementation, engine.forward.compiler
    kernel, was_on = ALL_ATTENTION_FUNCTIONS.get(kind), compiler is not None and compiler.on
    hooks = [
        module.register_forward_hook(functools.partial(watch.note_module, name))
        for name, module in engine.model.named_modules()
        if not _PART.search(name)
    ]
    try:
        if kernel is not None:
            AttentionInterface.register(kind, functools.partial(watch.attend, kernel))
        if compiler is not None:
            compiler.on = False  # compiled code calls no hooks
        log_probs = engine.compute_log_probs(data, micro_batch_size=1)
    finally:
        for hook in hooks:
            hook.remove()
        if kernel is not None:
            AttentionInterface.register(kind, kernel)
        if compiler is not None:
            compiler.on = was_on
    return watch.seen | {LOG_PROBS: log_probs.values.unsqueeze(1)}


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
