"""Small LoRA adapters on disk for tests, in peft's form, written without peft."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TINY_LAYERS = {f"model.layers.{i}.self_attn.{name}": (128, 128) for i in range(2) for name in ("q_proj", "o_proj")}


def write_adapter(
    folder: Path, layers: Mapping[str, tuple[int, int]] = TINY_LAYERS, rank: int = 4, **changes: Any
) -> Path:
    """An adapter of random factors for layers with these (inputs, outputs); `changes` are entries of its config."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (inputs, outputs) in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = rng.normal(size=(outputs, rank)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder
