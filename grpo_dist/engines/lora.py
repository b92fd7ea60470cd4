"""LoRA (arXiv 2106.09685) by peft: small trained factors beside frozen weights, W + scaling * B A.

The factors are added before the model is sharded, and merged, tensor by tensor, into what goes to the rollout engines
and into exported folders: those need to know nothing of LoRA. The reference is the same model with the factors switched
off, so there are no reference workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_dist.engines.settings import LoraSettings
from grpo_dist.engines.sharded import whole
from grpo_dist.errors import ConfigError

ADAPTER = "default"  # peft's name of the first adapter
KEY = "actor_rollout_ref.model"


def add_lora(model: Any, settings: LoraSettings) -> None:
    """Freeze the model and put trainable factors beside its target modules; B is 0, so nothing changes yet.

    Raises:
        ConfigError: peft is not installed, or no module has such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"{KEY}.lora_rank={settings.rank}: needs peft ({error}); pip install -e '.[lora]'") from None
    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=list(settings.exclude_modules) or None,
        bias="none",
    )
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(f"{KEY}.target_modules={targets}: {error}") from None


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The modules with factors, by name; {} without LoRA."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block the model is what it was before training: the reference."""
    layers = lora_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_parameters(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name before LoRA, whole tensor in `dtype`) one at a time; a tied tensor comes once. Collective."""
    layers = lora_layers(model)
    for name, parameter in model.named_parameters():
        owner, base, leaf = name.rpartition(".base_layer.")
        if ".lora_" in name:
            continue
        if base and leaf == "weight":
            layer = layers[owner]
            factors = [whole(factor[ADAPTER].weight.detach().float()) for factor in (layer.lora_B, layer.lora_A)]
            change = layer.scaling[ADAPTER] * (factors[0] @ factors[1])
            yield f"{owner}.{leaf}", (whole(parameter.detach().float()) + change).to(dtype)
        else:
            yield f"{owner}.{leaf}" if base else name, whole(parameter.detach().to(dtype))
