"""LoRA's factors as a folder in peft's form: what `peft.PeftModel.from_pretrained(base, folder)` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from grpo_dist.assets.adapter_folder import ADAPTER_WEIGHTS
from grpo_dist.assets.usage import Usage
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.fsdp_model import full_factors
from grpo_dist.engines.train.hf_export import write_folder
from grpo_dist.engines.train.lora import lora_layers
from grpo_dist.engines.train.model_loading import DTYPES


def export_adapter(model: Any, settings: ModelSettings, folder: Path, dtype: str, usage: Usage | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors. Collective; see `write_folder`.

    Args:
        model: with factors.
        settings: what it was loaded from.
        folder: where the files go.
        dtype: of the factors in the file: "fp32" or "bf16".
        usage: what the folder says of itself; None: nothing.

    Raises:
        CheckpointError: on every rank: the files cannot be written.
    """
    factors = full_factors(model, DTYPES[dtype])

    def write(temporary: Path) -> None:
        _config(model, settings).save_pretrained(str(temporary))
        save_file(
            {name: factor.contiguous() for name, factor in factors}, temporary / ADAPTER_WEIGHTS, {"format": "pt"}
        )
        if usage is not None:
            usage.write(temporary)

    parts = [part for layer in lora_layers(model).values() for part in (layer.lora_A, layer.lora_B)]
    num_parameters = sum(factor.numel() for part in parts for factor in part.parameters())
    write_folder(folder, write, factors, num_parameters * DTYPES[dtype].itemsize)


def _config(model: Any, settings: ModelSettings) -> Any:
    """Peft's config of the factors; the same on any number of ranks, so its lists are sorted."""
    from peft import LoraConfig

    lora, layers = settings.lora, lora_layers(model)
    assert lora is not None
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # type: ignore[arg-type]
        bias="none",
        fan_in_fan_out=any(layer.fan_in_fan_out for layer in layers.values()),  # Conv1D
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=lora.base_model or str(Path(settings.path).absolute()),
    )
    ends = sorted({name.rpartition(".")[2] for name in layers})
    called = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    config.target_modules = ends if called == layers.keys() else sorted(layers)  # type: ignore[assignment]
    return config
