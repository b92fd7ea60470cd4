"""What each operation of vLLM's model gives, to compare it with the trainer.

The outputs have the names of transformers' modules: fused projections are taken apart, and the residual stream after a
layer is the sum that vLLM takes in the next norm. `rope.q` and `rope.k` are what enters the attention.
"""

from __future__ import annotations

import functools
import io
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

_LAYER = re.compile(r"layers\.\d+$")


class Watching:
    """The part of `WorkerExtension` that watches the model, while a request is alone in the engine."""

    model_runner: Any
    _seen: defaultdict[str, list[Tensor]]
    _hooks: list[Any]

    def watch(self) -> None:
        """Begin to note outputs."""
        model = self.model_runner.get_model()
        self._seen, packed = defaultdict(list), getattr(model, "packed_modules_mapping", {})
        self._hooks = [
            module.register_forward_hook(functools.partial(self._note, name, packed))
            for name, module in model.named_modules()
        ]

    def watched(self) -> bytes:
        """End that; returns what `torch.save` makes of the outputs by name, (tokens, F) each."""
        for hook in self._hooks:
            hook.remove()
        file = io.BytesIO()
        torch.save({name: torch.cat(parts) for name, parts in self._seen.items()}, file)
        return file.getvalue()

    def attention_kernels(self) -> list[str]:
        """The classes of the model's attention kernels."""
        modules = self.model_runner.get_model().modules()
        return sorted({type(module.impl).__name__ for module in modules if hasattr(module, "impl")})

    def _note(self, name: str, packed: dict[str, list[str]], module: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        if isinstance(output, tuple) and _LAYER.search(name):
            first = output[0] + output[1]
        parent, _, leaf = name.rpartition(".")
        parts, sizes = packed.get(leaf, []), getattr(getattr(module, "base_layer", module), "output_sizes", [])
        outputs = {name: first}
        if leaf == "attn":
            outputs = {f"{parent}.rope.q": inputs[0], f"{parent}.rope.k": inputs[1], f"{parent}.attention": first}
        elif leaf == "logits_processor":
            outputs = {"lm_head": first}
        elif parts and len(parts) == len(sizes) and sum(sizes) == first.shape[-1]:
            names = (f"{parent}.{part}" for part in parts)
            outputs = dict(zip(names, first.split(sizes, -1), strict=True))
        for key, values in outputs.items():
            self._seen[key].append(values.flatten(1).to("cpu", copy=True))
