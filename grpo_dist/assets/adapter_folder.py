"""Checks a folder with a LoRA adapter in peft's form, by its config and the header of its weights.

As `model_folder` it reads no weights and needs neither torch nor peft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.assets import expanded, is_folder
from grpo_dist.assets.model_folder import Shapes, read_header, read_object, some
from grpo_dist.errors import DataError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "lora_adapter"  # beside the merged model; verl's name
PREFIX = "base_model.model."  # peft's, before the name of a module
A, B = ".lora_A.weight", ".lora_B.weight"
_WRITTEN = "give a folder that peft's save_pretrained, or a run of this trainer, has written"
REMEDY = "merge the adapter into its base model (peft's merge_and_unload) and train that"
# What changes W + lora_alpha / r * B A into another function, or trains more than factors: by entry of the config, the
# values that do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    # the others change the weights of the base model
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
_NOT_TAKEN = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter that passed the checks.

    Attributes:
        rank: of its factors.
        alpha: the scaling of B A is alpha / rank.
        layers: (inputs, outputs) of each layer with factors, by the name of the module.
    """

    rank: int
    alpha: float
    layers: Mapping[str, tuple[int, int]]


def read_adapter_folder(folder: str | Path, setting: str) -> AdapterFolder:
    """Check adapter_config.json and the header of the weights against each other.

    Raises:
        DataError: it is no folder with an adapter of plain LoRA, or a factor is missing or of another shape.
    """
    folder = expanded(str(folder))
    if not is_folder(folder):
        raise DataError(f"{setting}: there is no such folder; give one with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    file = folder / ADAPTER_WEIGHTS
    try:
        rank, alpha = _rank_and_alpha(read_object(folder / ADAPTER_CONFIG, setting, _WRITTEN), setting)
        if not file.is_file():
            pickled = sorted(other.name for other in folder.glob("adapter_model.*"))
            why = f"the weights are pickled ({some(pickled)}), which can run code when loaded" if pickled else ""
            raise DataError(
                f"{setting}: {why or 'no weights in the folder'}; {ADAPTER_WEIGHTS} is needed, which peft's "
                "save_pretrained(FOLDER) writes"
            )
        return AdapterFolder(rank, alpha, _layers(read_header(file, setting), rank, setting))
    except OSError as error:
        raise DataError(f"{setting}: cannot be read: {str(error)[:200]}") from None


def _rank_and_alpha(config: Mapping[str, Any], setting: str) -> tuple[int, float]:
    odd = {key: config.get(key) for key, plain in _PLAIN.items() if config.get(key) not in plain}
    odd |= {key: config[key] for key in _NOT_TAKEN if config.get(key)}
    if odd:
        named = ", ".join(f"{key}={json.dumps(value)[:80]}" for key, value in odd.items())
        raise DataError(
            f"{setting}: {ADAPTER_CONFIG} says {named}; only plain LoRA, one rank and alpha for all layers, is trained "
            f"here: {REMEDY}"
        )
    return _number(config, "r", int, setting), float(_number(config, "lora_alpha", int | float, setting))


def check_base(adapter: AdapterFolder, shapes: Shapes, setting: str) -> None:
    """Check an adapter against the tensors of its base model.

    A model's modules may have other names than its files, at their beginning; so what follows it is compared.

    Args:
        shapes: of the tensors in the base model's files, by name.
        setting: the key and value that name the adapter, for messages.
    """
    matrices = {f".{name}": shape for name, shape in shapes.items() if len(shape) == 2}
    for name, sizes in adapter.layers.items():
        end = f".{name.partition('.')[2] or name}.weight"
        of_layer = [shape for matrix, shape in matrices.items() if matrix.endswith(end)]
        if not of_layer:
            raise DataError(f"{setting}: it has factors for {name}, which the model has not: {_OTHER_BASE}")
        if not any(sorted(shape) == sorted(sizes) for shape in of_layer):  # of Conv1D layers inputs come first
            raise DataError(
                f"{setting}: its factors for {name} are of a layer with {sizes[0]} inputs and {sizes[1]} outputs, and "
                f"the model's weight is of shape {of_layer[0]}: {_OTHER_BASE}"
            )


_OTHER_BASE = f"it belongs to another base model (base_model_name_or_path in {ADAPTER_CONFIG})"


def _layers(shapes: Shapes, rank: int, setting: str) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each layer, from the shapes of its factors."""
    odd = sorted(name for name in shapes if not (name.startswith(PREFIX) and name.endswith((A, B))))
    if odd or not shapes:
        what = f"tensors that are no factors of linear layers: {some(odd)}" if odd else "no tensors"
        raise DataError(f"{setting}: {ADAPTER_WEIGHTS} holds {what}; only those are trained here: {REMEDY}")
    stems = dict.fromkeys(name.removesuffix(A).removesuffix(B) for name in shapes)
    if missing := [stem + end for stem in stems for end in (A, B) if stem + end not in shapes]:
        raise DataError(f"{setting}: {ADAPTER_WEIGHTS} lacks {some(missing)}; copy the folder again")
    layers = {}
    for stem in stems:
        a, b = shapes[stem + A], shapes[stem + B]
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise DataError(
                f"{setting}: {ADAPTER_CONFIG} says r={rank}, and {stem + A} is of shape {a}, {stem + B} of {b}; config "
                "and weights do not belong together"
            )
        layers[stem.removeprefix(PREFIX)] = (a[1], b[0])
    return layers


def _number(config: Mapping[str, Any], key: str, kind: Any, setting: str) -> Any:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
        raise DataError(f"{setting}: {ADAPTER_CONFIG}: {key} must be a number above 0, is {json.dumps(value)[:80]}")
    return value
