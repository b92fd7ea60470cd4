"""The trained policy as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_dist.engines.durable import flush_path, flush_tree
from grpo_dist.engines.fsdp_engine import FSDPEngine
from grpo_dist.errors import CheckpointError


def export_hf_model(engine: FSDPEngine, folder: Path) -> None:
    """Write a folder that `transformers` and vLLM load: config, safetensors, tokenizer. Collective; rank 0 writes.

    The folder is there whole or not at all; one of that name is replaced.

    Raises:
        CheckpointError: on every rank: the disk refuses.
    """
    import transformers
    from safetensors import SafetensorError

    state = engine.export_state()
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            engine.settings.path, trust_remote_code=engine.settings.trust_remote_code
        )
        temporary = folder.with_name(f"{folder.name}.tmp")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            for part in (engine.model.config, engine.model.generation_config, tokenizer):
                part.save_pretrained(temporary)
            _save_safetensors(state, temporary)
            flush_tree(temporary)
            _put_in_place(temporary, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            failure = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointError(
            f"cannot write the trained policy to {folder}: {failure[0]}. Make room there, or make it writable "
            "(trainer.default_local_dir), and start the same command again: it goes on from the last checkpoint"
        )


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Give the folder its name; one that has it, of an earlier end of this run, goes once its name is free."""
    aside = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    temporary.rename(folder)
    flush_path(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


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
