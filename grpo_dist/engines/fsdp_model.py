"""A Hugging Face causal LM sharded with FSDP2 (`fully_shard`), and the process group it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grpo_dist.engines.attention import attention_implementation
from grpo_dist.engines.head import ResponseHead
from grpo_dist.engines.lora import add_lora, merged_parameters
from grpo_dist.engines.meeting import LOOPBACK, stay_on_loopback
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.errors import DataError

MOST_NAMED = 3  # weights in a message
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def init_process_group(*, device: str, rank: int, world_size: int, store: dist.TCPStore) -> None:
    """Join the role's process group, at the store that rank 0 has opened: gloo on CPU, nccl (gloo for CPU tensors) on
    GPU.
    """
    if device == "cuda":
        torch.cuda.set_device(0)  # Ray shows each process its own GPUs only
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if store.host == LOOPBACK:
        stay_on_loopback()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def load_sharded_model(settings: ModelSettings, device: str) -> Any:
    """Load a causal LM and shard it over the default process group.

    Every layer of the model's own no-split classes becomes one FSDP unit, the rest another. With an `fsdp_size` below
    the number of ranks, groups of so many ranks hold copies of each other (hybrid sharding).

    Raises:
        DataError: the model cannot be loaded.
    """
    model = load_model(settings, device)
    if settings.lora is not None:
        add_lora(model, settings.lora)
    ResponseHead.install(model)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compute, master = DTYPES[settings.compute_dtype], DTYPES[settings.model_dtype]
    policy = MixedPrecisionPolicy(param_dtype=None if compute == master else compute, reduce_dtype=torch.float32)
    shards = num_shards(settings)
    hybrid = (dist.get_world_size() // shards, shards)
    mesh_shape, names = (hybrid, ("replicate", "shard")) if hybrid[0] > 1 else (hybrid[1:], ("shard",))
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, mesh_shape, mesh_dim_names=names),
        "mp_policy": policy,
        "reshard_after_forward": reshards(settings),
    }
    for layer in transformer_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def num_shards(settings: ModelSettings) -> int:
    """Ranks that hold one copy of the weights together."""
    return dist.get_world_size() if settings.fsdp_size < 0 else min(settings.fsdp_size, dist.get_world_size())


def reshards(settings: ModelSettings) -> bool:
    """Whether gathered weights are freed early. A rank that holds everything anyway would only copy them anew."""
    return settings.reshard_after_forward and num_shards(settings) > 1


def load_model(settings: ModelSettings, device: str) -> Any:
    """The unsharded model on CPU, in eval mode, with the attention that its layout takes on `device`.

    Raises:
        DataError: there is no usable model at the path.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    code = {"trust_remote_code": settings.trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(settings.path, **code)
        config.update(dict(settings.override_config))
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            settings.path,
            config=config,
            dtype=DTYPES[settings.model_dtype],
            attn_implementation=attention_implementation(config, settings.layout, device),
            use_safetensors=True,  # pickled weights can run code
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the library's own error does not say which; check_weights does
            **code,
        )
    except Exception as error:  # the library, and code that comes with a model, raise errors of many kinds
        problem = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise DataError(f"actor_rollout_ref.model.path={settings.path}: cannot load a causal LM: {problem}") from error
    model, report = loaded
    check_weights(model, report["missing_keys"], report["mismatched_keys"], settings.path)
    return model.eval()


def check_weights(
    model: nn.Module, missing: Collection[str], mismatched: Collection[tuple[str, Any, Any]], path: str
) -> None:
    """Check that all weights were there and are numbers.

    Args:
        model: the loaded model.
        missing: names of weights that were not in the files.
        mismatched: weights of another shape: name, shape in the file, shape that config.json asks for.
        path: of the model, for messages.

    Raises:
        DataError: some were missing or of another shape, so they are random now, or have a nan or an infinity.
    """
    setting = f"actor_rollout_ref.model.path={path}"
    if mismatched:
        shapes = [f"{name} {tuple(found)}, should be {tuple(wanted)}" for name, found, wanted in sorted(mismatched)]
        raise DataError(f"{setting}: the weights are not of the shapes that config.json says: {_some(shapes)}")
    if missing:
        raise DataError(f"{setting}: the weights are incomplete: there is no {_some(sorted(missing))}")
    bad = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]
    if bad:
        raise DataError(f"{setting}: nan or infinity in the weights: {_some(bad)}; the file is damaged")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the class names that the model itself says must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def full_parameters(model: nn.Module, dtype: torch.dtype, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor on `device` in `dtype`) one at a time; a tied tensor comes once.

    LoRA's factors are merged. Collective: all ranks iterate together.
    """
    for name, tensor in merged_parameters(model, dtype):
        yield name, tensor.to(device)


@contextlib.contextmanager
def gradient_sync(model: Any, *, enabled: bool, keep_gathered: bool) -> Iterator[None]:
    """Within the block, backward passes reduce gradients over ranks only if `enabled` (the last micro-batch).

    The others leave the weights gathered for the next one, if `keep_gathered`.
    """
    model.set_requires_gradient_sync(enabled)
    model.set_reshard_after_backward(enabled or not keep_gathered)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
