"""Model, optimizer and schedule on disk: sharded with torch.distributed.checkpoint, and as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from grpo_dist.engines.fsdp_engine import FSDPEngine
from grpo_dist.errors import CheckpointError


def save_engine(engine: FSDPEngine, folder: Path) -> None:
    """Write shards of model, optimizer and schedule. Collective; every rank writes its own file."""
    model, optimizer = get_state_dict(engine.model, engine.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "schedule": engine.schedule.state_dict()}, checkpoint_id=folder)


def load_engine(engine: FSDPEngine, folder: Path) -> None:
    """Read what `save_engine` wrote, on any number of ranks. Collective.

    Raises:
        CheckpointError: the folder is not a readable checkpoint of this model.
    """
    model, optimizer = get_state_dict(engine.model, engine.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": engine.schedule.state_dict()}
    _load(state, folder)
    set_state_dict(engine.model, engine.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    engine.schedule.load_state_dict(state["schedule"])


def save_parameters(engine: FSDPEngine, folder: Path) -> None:
    """Write shards of the weights alone. Collective."""
    dcp.save({"model": get_model_state_dict(engine.model)}, checkpoint_id=folder)


def load_parameters(engine: FSDPEngine, folder: Path) -> None:
    """Read what `save_parameters` wrote, on any number of ranks. Collective.

    Raises:
        CheckpointError: the folder is not a readable checkpoint of this model.
    """
    _load({"model": (model := get_model_state_dict(engine.model))}, folder)
    set_model_state_dict(engine.model, model)


def _load(state: dict[str, Any], folder: Path) -> None:
    try:
        dcp.load(state, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        raise CheckpointError(f"{folder} cannot be read as a checkpoint of this model: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The failures of a CheckpointException by rank, without its tracebacks; any other error's own text."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())


def export_hf_model(engine: FSDPEngine, folder: Path) -> None:
    """Write a folder that `transformers` and vLLM load: config, safetensors, tokenizer. Collective; rank 0 writes."""
    import transformers

    state = engine.export_state()
    if dist.get_rank() == 0:
        model = engine.model
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        _save_safetensors(state, folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            engine.settings.path, trust_remote_code=engine.settings.trust_remote_code
        )
        tokenizer.save_pretrained(folder)
    dist.barrier()


def _save_safetensors(state: dict[str, Any], folder: Path) -> None:
    """Shards of at most 5 GB with an index, as `save_pretrained` lays them out."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards(state)
    for filename, names in plan.filename_to_tensors.items():
        save_file({name: state[name].contiguous() for name in names}, folder / filename, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
