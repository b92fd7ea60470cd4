"""LoRA adapters: one that training goes on from decides rank, alpha and layers; engines take some, and not others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from grpo_dist.assets import is_folder
from grpo_dist.assets.adapter_folder import read_adapter_folder
from grpo_dist.config.problems import Problem, problem_between, shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import ModelConfig
from grpo_dist.errors import DataError
from grpo_dist.sizes import ENGINE_LORA_RANKS

ADAPTER_KEY = "lora_adapter_path"
_MODEL = "actor_rollout_ref.model"


def take_adapter(raw: dict[str, Any], section: str, given: Collection[str]) -> tuple[list[Problem], list[str]]:
    """Put what an adapter says into LoRA's other keys. A folder that does not exist is left to the rules.

    Args:
        raw: the config before it is validated; changed in place.
        section: the section with LoRA's keys, such as "actor_rollout_ref.model".
        given: the keys that the user has set.

    Returns:
        (what is wrong with the adapter, or contradicts it; keys that have no effect beside it, a note each).
    """
    model: Any = raw
    for name in section.split("."):
        model = model[name]
    path, key = model.get(ADAPTER_KEY), f"{section}.{ADAPTER_KEY}"
    if not isinstance(path, str) or not is_folder(path):
        return [], []
    setting = f"{key}={shown(path)}"
    try:
        adapter = read_adapter_folder(path, setting)
    except DataError as error:
        return [Problem(str(error), (key,))], []
    problems = [
        Problem(
            f"{section}.{name}={shown(model[name])}, {setting}: the adapter has {own}={value:g}, and training goes on "
            f"with that; leave {name} out",
            (f"{section}.{name}", key),
        )
        for name, own, value in (("lora_rank", "r", adapter.rank), ("lora_alpha", "lora_alpha", adapter.alpha))
        if f"{section}.{name}" in given and model[name] not in (0, value)
    ]
    idle = [f"{section}.{name}" for name in ("target_modules", "exclude_modules") if f"{section}.{name}" in given]
    model |= {
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.layers}),
        "exclude_modules": None,
    }
    return problems, [f"{name} has no effect: the layers with factors are those of {setting}" for name in idle]


def targets_output_layer(model: ModelConfig) -> bool:
    """Return whether LoRA's factors are to stand beside the output layer, by its usual name."""
    targets, excluded = (
        {name.rpartition(".")[2] for name in names or ()} for names in (model.target_modules, model.exclude_modules)
    )
    return "lm_head" in targets - excluded


def engines_take_the_factors(config: RunConfig) -> Iterator[Problem]:
    """Return what engines cannot compute with, beside the weights of the model folder."""
    model = config.actor_rollout_ref.model
    if not model.sends_factors:
        return
    if model.lora_rank > ENGINE_LORA_RANKS[-1]:
        why = f"engines take ranks up to {ENGINE_LORA_RANKS[-1]}; lower it, or set the second to true"
        yield problem_between(config, why, f"{_MODEL}.lora_rank", f"{_MODEL}.lora.merge")
    if targets_output_layer(model):
        why = "engines get no factors of the output layer; leave lm_head out, or set the second to true"
        yield problem_between(config, why, f"{_MODEL}.target_modules", f"{_MODEL}.lora.merge")
