"""Training that goes on from a LoRA adapter: rank, alpha and layers are the adapter's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from grpo_dist.assets.adapter_folder import read_adapter_folder
from grpo_dist.assets.paths import is_folder
from grpo_dist.config.problems import Problem, shown
from grpo_dist.errors import DataError

ADAPTER_KEY = "lora_adapter_path"


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
