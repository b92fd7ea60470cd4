"""Every adapter that cannot be trained on is told by name, and a good one passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_dist.assets.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_base, read_adapter_folder
from grpo_dist.errors import DataError
from tests.adapters import write_adapter
from tests.messages import refuses

SETTING = "actor_rollout_ref.model.lora_adapter_path=mine"
LAYERS = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.1.mlp.up_proj": (8, 12)}


def test_a_good_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", LAYERS, init_lora_weights="gaussian", lora_dropout=0.05)
    found = read_adapter_folder(folder, SETTING)
    assert (found.rank, found.alpha, found.layers) == (4, 8.0, LAYERS)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"use_dora": True}, ["use_dora=true"]),
        ({"use_rslora": True}, ["use_rslora=true"]),
        ({"bias": "lora_only"}, ['bias="lora_only"']),
        ({"modules_to_save": ["lm_head"]}, ['modules_to_save=["lm_head"]']),
        ({"rank_pattern": {"q_proj": 8}}, ["rank_pattern="]),
        ({"init_lora_weights": "pissa"}, ['init_lora_weights="pissa"']),
        ({"peft_type": "IA3", "use_dora": True}, ['peft_type="IA3"', "use_dora=true"]),
        ({"r": 0}, ["r", "0"]),
        ({"r": None}, ["r", "null"]),
        ({"lora_alpha": "much"}, ["lora_alpha", '"much"']),
        ({"r": 2}, ["r=2", "(4, 8)"]),
    ],
)
def test_configs_that_are_not_taken(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    folder = write_adapter(tmp_path, LAYERS, **changes)
    with refuses(DataError, SETTING, ADAPTER_CONFIG, *parts):
        read_adapter_folder(folder, SETTING)


def with_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        change(tensors)
        save_file(tensors, folder / ADAPTER_WEIGHTS)

    return damage


FACTOR = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda folder: (folder / ADAPTER_CONFIG).unlink(), [ADAPTER_CONFIG, "save_pretrained"]),
    "no JSON": (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), [ADAPTER_CONFIG]),
    "no object": (lambda folder: (folder / ADAPTER_CONFIG).write_text("[]"), [ADAPTER_CONFIG, "list"]),
    "no weights": (
        lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), [ADAPTER_WEIGHTS, "save_pretrained(FOLDER)"]
    ),
    "pickled": (
        lambda folder: (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin"),
        ["adapter_model.bin", ADAPTER_WEIGHTS],
    ),
    "cut off": (
        lambda folder: (folder / ADAPTER_WEIGHTS).write_bytes((folder / ADAPTER_WEIGHTS).read_bytes()[:300]),
        [ADAPTER_WEIGHTS, "damaged"],
    ),
    "a factor is missing": (with_tensors(lambda tensors: tensors.pop(FACTOR)), [FACTOR]),
    "empty": (with_tensors(lambda tensors: tensors.clear()), ["no tensors"]),
    "an embedding": (
        with_tensors(lambda tensors: tensors.update({EMBEDDING: np.zeros((4, 8), np.float32)})),
        [EMBEDDING, "merge_and_unload"],
    ),
    "no folder": (lambda folder: folder.rename(f"{folder}.gone"), [ADAPTER_CONFIG]),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_folders(tmp_path: Path, case: str) -> None:
    damage, parts = DAMAGES[case]
    folder = write_adapter(tmp_path / "adapter", LAYERS)
    damage(folder)
    with refuses(DataError, SETTING, *parts):
        read_adapter_folder(folder, SETTING)


def test_the_base_model(tmp_path: Path) -> None:
    adapter = read_adapter_folder(write_adapter(tmp_path, LAYERS), SETTING)
    shapes = {f"{name}.weight": (outputs, inputs) for name, (inputs, outputs) in LAYERS.items()}
    check_base(adapter, shapes, SETTING)
    check_base(adapter, {f"language_model.{name}": shape for name, shape in shapes.items()}, SETTING)
    check_base(adapter, {name.removeprefix("model."): shape[::-1] for name, shape in shapes.items()}, SETTING)
    with refuses(DataError, SETTING, "model.layers.1.mlp.up_proj", "8", "12", "(24, 8)", "base_model_name_or_path"):
        check_base(adapter, shapes | {"model.layers.1.mlp.up_proj.weight": (24, 8)}, SETTING)
    shapes.pop("model.layers.0.self_attn.q_proj.weight")
    with refuses(DataError, SETTING, "model.layers.0.self_attn.q_proj", "base_model_name_or_path"):
        check_base(adapter, shapes, SETTING)
