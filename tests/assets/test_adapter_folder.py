"""Every adapter that cannot be trained on is told by name, and a good one passes."""

from __future__ import annotations

import subprocess
import sys
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


def test_it_loads_neither_torch_nor_peft(tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_dist.assets.model_folder import read_adapter_folder as read;"
        f"read({str(write_adapter(tmp_path))!r}, 'x'); print(sorted({{'torch', 'peft', 'ray'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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


def no_config(folder: Path) -> None:
    (folder / ADAPTER_CONFIG).unlink()


def no_json(folder: Path) -> None:
    (folder / ADAPTER_CONFIG).write_text("{")


def no_object(folder: Path) -> None:
    (folder / ADAPTER_CONFIG).write_text("[]")


def no_weights(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).unlink()


def pickled(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")


def cut_off(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).write_bytes((folder / ADAPTER_WEIGHTS).read_bytes()[:300])


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    change(tensors)
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def missing(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.pop("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"))


def empty(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.clear())


def embedding(folder: Path) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    changed(folder, lambda tensors: tensors.update({name: np.zeros((4, 8), np.float32)}))


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (no_config, [ADAPTER_CONFIG, "save_pretrained"]),
        (no_json, [ADAPTER_CONFIG]),
        (no_object, [ADAPTER_CONFIG, "list"]),
        (no_weights, [ADAPTER_WEIGHTS, "save_pretrained(FOLDER)"]),
        (pickled, ["adapter_model.bin", ADAPTER_WEIGHTS]),
        (cut_off, [ADAPTER_WEIGHTS, "damaged"]),
        (missing, ["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]),
        (empty, ["no tensors"]),
        (embedding, ["base_model.model.model.embed_tokens.lora_embedding_A", "merge_and_unload"]),
    ],
)
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], None], parts: list[str]) -> None:
    folder = write_adapter(tmp_path, LAYERS)
    damage(folder)
    with refuses(DataError, SETTING, *parts):
        read_adapter_folder(folder, SETTING)


def test_no_folder(tmp_path: Path) -> None:
    with refuses(DataError, SETTING, ADAPTER_CONFIG):
        read_adapter_folder(tmp_path / "nowhere", SETTING)


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
