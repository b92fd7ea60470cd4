"""A model's tensors under the names and in the form of its files, as exported folders have them and vLLM loads them.

transformers holds the experts of a layer as one tensor of three dimensions, and some other weights under names of its
own; files have a tensor for each expert. This module undoes the conversions of the loading.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion

from grpo_dist.engines.train.lora import merged_names


def as_in_files(model: Any, tensors: Iterable[tuple[str, Tensor]], device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """A model's tensors as its files had them: transformers' renamings and conversions are undone.

    Args:
        model: loaded by `model_loading`.
        tensors: all of its parameters by name. Those that form one tensor of a file are held until all have come.
        device: of the tensors; the buffers that are in the files are copied to it, and come last.
    """
    back = [conversion.reverse_transform() for conversion in reversed(model._weight_conversions)]
    renamings = [step for step in back if isinstance(step, WeightRenaming)]
    others = [step for step in back if not isinstance(step, WeightRenaming)]

    def group_of(name: str) -> str:
        return rename_source_key(name, renamings, others, reverse=True)[0]

    computed = {name for name, _ in model.named_non_persistent_buffers()}
    buffers = [(name, buffer.to(device)) for name, buffer in model.named_buffers() if name not in computed]
    members = Counter(group_of(name) for name in (*merged_names(model), *(name for name, _ in buffers)))
    held: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for source in (tensors, buffers):
        for name, tensor in source:
            group = group_of(name)
            held[group][name] = tensor
            if len(held[group]) == members[group]:
                yield from revert_weight_conversion(model, held.pop(group)).items()


def lost_names(model: Any, files: Mapping[str, Tensor]) -> list[str]:
    """Tensors that `as_in_files` would give a name or a shape that the files do not have.

    Args:
        model: on the meta device, loaded from `files`.
        files: the tensors of its files, on the meta device.
    """
    prefix = f"{model.base_model_prefix}."  # files of a model without its head lack it, which loading allows for
    shapes = {name.removeprefix(prefix): tensor.shape for name, tensor in files.items()}
    given = as_in_files(model, model.named_parameters(), "meta")
    return sorted(name for name, tensor in given if shapes.get(name.removeprefix(prefix)) != tensor.shape)
