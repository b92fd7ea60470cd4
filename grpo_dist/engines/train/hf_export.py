"""The trained model, or its LoRA factors in peft's form, as a Hugging Face folder.

A folder is written file by file while its tensors are gathered one by one.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from grpo_dist.assets import is_on_the_hub
from grpo_dist.assets.model_folder import ADAPTER_WEIGHTS, Usage, load_tokenizer
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.durable_files import delete, flush_path, flush_tree, publish_modes, require_room
from grpo_dist.engines.train.lora import full_factors, full_parameters, lora_layers, name_in_whole
from grpo_dist.engines.train.model_loading import DTYPES, as_in_files, carried_tensors, is_part, read_config
from grpo_dist.errors import CheckpointError
from grpo_dist.sizes import EXPORT_FILE_BYTES

WEIGHTS = "model.safetensors"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

logger = logging.getLogger(__name__)


def export_hf_model(model: Any, settings: ModelSettings, folder: Path, dtype: str, usage: Usage | None = None) -> None:
    """Write a folder that `transformers` and vLLM load: config, safetensors, tokenizer. Collective; rank 0 writes.

    LoRA factors are merged. What a model has beside its language part is as it was: tensors, config, processors. A
    reward model is loaded by `AutoModelForSequenceClassification`, which reads the score at the last token that is not
    `pad_token_id` of config.json: where it was trained, since that is kept (see `_set_padding`). Beside its shards rank
    0 holds `EXPORT_FILE_BYTES` or the largest tensor.
    """
    tensors, parts = full_parameters(model, DTYPES[dtype]), []
    if dist.get_rank() == 0:
        tokenizer = load_tokenizer(settings.path, trust_remote_code=settings.model.trust_remote_code, key=settings.key)
        config = read_config(settings)
        if not is_part(config) or settings.num_labels:
            config = copy.deepcopy(model.config)
        config.dtype = config.get_text_config().dtype = DTYPES[dtype]
        parts = [config, tokenizer]
        if settings.num_labels:
            _set_padding(config.get_text_config(), tokenizer)
        else:
            parts.append(model.generation_config)

    def write(temporary: Path) -> None:
        for part in parts:
            part.save_pretrained(temporary)
        for file in filter(Path.is_file, (Path(settings.path, name) for name in PROCESSOR_FILES)):
            shutil.copyfile(file, temporary / file.name)
        _save_safetensors(chain(as_in_files(model, tensors), carried_tensors(model, settings)), temporary)
        if usage is not None:
            usage.write(temporary)

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    write_folder(folder, write, tensors, num_parameters * DTYPES[dtype].itemsize)


def write_folder(folder: Path, write: Callable[[Path], None], tensors: Iterator[Any], num_bytes: int) -> None:
    """Have rank 0 write a folder, which appears only when it is complete, and replaces one of that name. Collective.

    Args:
        write: writes the files into another, temporary folder.
        tensors: what rank 0 gathers while it writes: the other ranks take part, and drop them.
        num_bytes: about what is written; without as much room on the disk nothing is.
    """
    failure = [""]
    if dist.get_rank() == 0:
        try:
            _write(write, folder, num_bytes)
        except (OSError, SafetensorError) as error:
            failure = [f"{type(error).__name__}: {error}"]
    for _ in tensors:  # gathering is collective, also what comes after a failure
        pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0]:
        raise CheckpointError(
            f"cannot write the trained model to {folder}: {failure[0]}. Make room there, or make it writable "
            "(trainer.default_local_dir), and start the same command again: it goes on from the last checkpoint"
        )


def _set_padding(config: Any, tokenizer: Any) -> None:
    """Let a classifier's config name the tokenizer's padding token if it names none, and no conversation ends in that.

    A model whose config names none was trained at the last token of conversations. If that may be the padding token,
    transformers would read scores at the token before; without `pad_token_id` it reads them at the last token, of one
    sequence at a time.
    """
    padding = tokenizer.pad_token_id
    if config.pad_token_id is not None or padding is None:
        return
    template = str(tokenizer.chat_template or "")
    if padding != tokenizer.eos_token_id and tokenizer.pad_token not in template and "pad_token" not in template:
        config.pad_token_id = padding
        return
    logger.warning(
        "conversations may end in the padding token (pad_token_id=%d, %r), and this model was trained at their "
        "last token; config.json names no padding token, so transformers scores one sequence at a time",
        padding,
        tokenizer.pad_token,
    )


def _write(write: Callable[[Path], None], folder: Path, num_bytes: int) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp")
    delete(temporary)
    try:
        require_room(folder, num_bytes)
        write(temporary)
        publish_modes(temporary)
        flush_tree(temporary)
        _put_in_place(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename the temporary folder; an older folder of that name, from an earlier end of this run, is removed after."""
    aside = folder.with_name(f"{folder.name}.old")
    delete(aside)
    if os.path.lexists(folder):
        folder.rename(aside)
    temporary.rename(folder)
    flush_path(folder.parent)
    with contextlib.suppress(OSError):  # the next export removes it
        delete(aside)


def _save_safetensors(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Files of at most `EXPORT_FILE_BYTES`, or of one tensor, with an index if they are several, as usual."""
    files: list[list[str]] = []
    total = 0
    for part in _parts(tensors):
        total += sum(tensor.nbytes for tensor in part.values())
        save_file(part, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(part))
        part.clear()
    named = {WEIGHTS: files[0]}
    if len(files) > 1:
        named = {f"model-{i + 1:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files)}
        weight_map = {name: file for file, names in named.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2))
    for i, file in enumerate(named):
        (folder / f"{i}.part").rename(folder / file)


def _parts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file; empty a dict before you ask for the next."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        tensor = tensor.contiguous()
        if tensor.untyped_storage().nbytes() > tensor.nbytes:  # a part of a larger one, which it would keep
            tensor = tensor.clone()
        if part and sum(other.nbytes for other in part.values()) + tensor.nbytes > EXPORT_FILE_BYTES:
            yield part
            part = {}
        part[name] = tensor
    yield part


def export_adapter(model: Any, settings: ModelSettings, folder: Path, dtype: str, usage: Usage | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors. Collective; takes the arguments of `export_hf_model`."""
    factors = full_factors(model, DTYPES[dtype])

    def write(temporary: Path) -> None:
        _config(model, settings).save_pretrained(str(temporary))
        whole = {name: factor.contiguous() for name, factor in factors}
        save_file(whole, temporary / ADAPTER_WEIGHTS, {"format": "pt"})
        if usage is not None:
            usage.write(temporary)

    parts = [part for layer in lora_layers(model).values() for part in (layer.lora_A, layer.lora_B)]
    num_parameters = sum(factor.numel() for part in parts for factor in part.parameters())
    write_folder(folder, write, factors, num_parameters * DTYPES[dtype].itemsize)


def _config(model: Any, settings: ModelSettings) -> Any:
    """Peft's config of the factors; the same on any number of ranks, so its lists are sorted."""
    from peft import LoraConfig

    lora, layers, here = settings.lora, lora_layers(model), str(Path(settings.path).absolute())
    assert lora is not None
    base, _, revision = lora.path.partition("@") if is_on_the_hub(lora.path) else (here, "", "")
    config = LoraConfig(
        **lora.factors,
        bias="none",
        fan_in_fan_out=any(layer.fan_in_fan_out for layer in layers.values()),  # Conv1D
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base,
        revision=revision or None,
    )
    ends = sorted({name.rpartition(".")[2] for name in layers})
    called = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    alone = called == layers.keys() and not model.place
    config.target_modules = ends if alone else sorted(name_in_whole(model, name) for name in layers)  # type: ignore[assignment]
    return config
