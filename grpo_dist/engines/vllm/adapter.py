"""LoRA's factors in a vLLM engine: they arrive as weights do, and come into force all at once, without a file.

The base model stays as it was loaded. Relies on the internals of vLLM 0.32: its own way in is a folder. Every request
runs with the one adapter, also before the first sync, when its factors are 0: the next sync changes them under running
requests, which could not change their adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_dist.assets.model_folder import read_header, some, weight_files
from grpo_dist.config.schema_roles import ALL_LINEAR, LoraSection
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.errors import ConfigError
from grpo_dist.sizes import engine_lora_rank

KEY = "actor_rollout_ref.model.lora.merge"
REMEDY = f"set {KEY}=true"
# Tensors of two dimensions in model files that are no linear layers, or whose factors are not taken: embeddings, output
# layers and routers, by the last part of the module's name.
_NOT_LINEAR = {"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "gate"}


def adapter_args(settings: EngineSettings) -> dict[str, Any]:
    """VLLM's arguments for one adapter; {} where merged weights are sent."""
    if settings.lora is None:
        return {}
    _check_family(Path(settings.model.path))
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": engine_lora_rank(settings.lora.lora_rank),
        # else vLLM gives factors to the output layer too, and computes with them
        "lora_target_modules": _layers(Path(settings.model.path), settings.lora),
    }


def _check_family(folder: Path) -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models import supports_lora

    for name in json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ():
        known = ModelRegistry.models.get(name)
        if known is not None and not supports_lora(known.load_model_cls()):
            raise ConfigError(f"{KEY}=false: vLLM's {name} takes no LoRA adapters; {REMEDY}")


def _layers(folder: Path, lora: LoraSection) -> list[str]:
    """The last parts of the names of the layers that get room for factors."""
    if lora.targets != ALL_LINEAR:
        return sorted({name.rpartition(".")[2] for name in lora.target_modules})
    headers = (read_header(folder / file, str(folder)) for file in weight_files(folder, str(folder)))
    shapes = {name: shape for header in headers for name, shape in header.items()}
    linear = {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and ".experts." not in name
    }
    return sorted(linear - _NOT_LINEAR)


def adapter_request() -> Any:
    """Return what names the adapter in a request; vLLM asks for a path, and never reads it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, "policy")


class Adapter:
    """The factors of one worker of an engine.

    Attributes:
        arriving: those of the sync under way, by their names in adapters in peft's form.
        present: those in force; {}: all are 0.
    """

    def __init__(self) -> None:
        self.arriving: dict[str, Tensor] = {}
        self.present: dict[str, Tensor] = {}

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep some factors; their memory is used again."""
        self.arriving |= {name: tensor.to("cpu", copy=True) for name, tensor in tensors}

    def install(self, manager: Any, rank: int, alpha: float, *, complete: bool) -> str:
        """Put the factors that have arrived in force, or, if they are not complete, those before again.

        Args:
            manager: the worker's LRUCacheWorkerLoRAManager. Whatever it holds is replaced.
            rank: of the factors.
            alpha: scaling = alpha / rank.
            complete: whether all factors have arrived.

        Returns:
            What vLLM does not take; "" if all is in force.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        present, self.arriving = self.arriving if complete else self.present, {}
        request, slots = adapter_request(), manager._adapter_manager
        manager.remove_all_adapters()
        if not present:
            manager.add_dummy_lora(request, rank)
            return ""
        mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
        model = LoRAModel.from_lora_tensors(
            request.lora_int_id,
            {name: factor.clone() for name, factor in present.items()},  # vLLM scales them in place
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),  # type: ignore[arg-type]
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        taken = {part for name in slots.modules for part in slots.packed_modules.get(name, [name])}
        if unknown := sorted(model.loras.keys() - taken):  # vLLM would leave them out without a word
            return f"vLLM has no place for the factors of {some(unknown)}"
        slots.add_adapter(model)
        slots.activate_adapter(model.id)
        self.present = present
        return ""
