"""A Hugging Face causal LM sharded with FSDP2 (`fully_shard`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_dist.engines.rendezvous import world_limit
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.attention import check_split, why_padded
from grpo_dist.engines.train.lm_head import Compiler, ResponseHead, head_modules, join_float32_head
from grpo_dist.engines.train.lora import add_lora, draw_factors, load_factors, lora_hidden
from grpo_dist.engines.train.model_loading import DTYPES, VISION, UnloadedModel, attach_vision, load_weights, open_model
from grpo_dist.engines.train.optimizer import saved_in_cpu_memory
from grpo_dist.engines.train.router_replay import RouterReplay, routers_of
from grpo_dist.engines.train.sharded_tensors import num_shards
from grpo_dist.errors import ConfigError

_BREAKS = "experts computed in float32 would break every layer into pieces (fsdp_config.dtype=bf16 does not)"


def load_sharded_model(settings: ModelSettings, device: str, *, frozen: bool = False) -> Any:
    """Load a causal LM, in eval mode, sharded over the default process group; no rank ever holds more than its shards.

    Every layer of its no-split classes becomes one FSDP unit, the rest another. With an `fsdp_size` below the number of
    ranks each group of that many holds a copy (hybrid sharding). Weights that do not train are left as they are where
    each rank holds all of them in the type of its passes: FSDP2 would hold them twice, sharded and gathered.
    """
    unloaded = build_model(settings, device, num_shards(settings))
    model = unloaded.model
    if settings.trains_vision:
        attach_vision(unloaded)
    whole = num_shards(settings) == 1 and settings.base_dtype == settings.compute_dtype
    if not (frozen and whole):
        shard(model, settings, device, leave_frozen=whole)
    with lora_hidden(model):
        load_weights(unloaded, device)
    for weight in model.parameters() if whole else ():
        if not isinstance(weight, DTensor):
            weight.requires_grad_(False)  # the loader puts new ones in place, which require gradients
    if settings.lora is not None and settings.lora.lora_adapter_path is not None:
        load_factors(model, settings.lora, settings.section)
    else:
        draw_factors(model)
    if settings.max_model_len is not None:
        hold_longrope_factors(model, settings.max_model_len)
    return model


def build_model(settings: ModelSettings, device: str, shards: int) -> UnloadedModel:
    """Build what a rank of so many trains, without memory: what is wrong with model and settings shows here."""
    unloaded = open_model(settings, device, shards)
    model = unloaded.model
    check_split(model.config, settings, why_padded(model))
    if settings.lora is not None:
        add_lora(model, settings.lora, settings.section, DTYPES[settings.model_dtype])
    if settings.replays_routes:
        model.router_replay = RouterReplay(model, settings.setting)
    head = ResponseHead.install(model)
    if settings.head_apart:
        join_float32_head(model, DTYPES[settings.compute_dtype])
    model.eval()  # for good: dropout, jitter and the like would make the update's policy another one than the sampler's
    layers, model.compiler, compiles = settings.layers, None, settings.fsdp_config.use_torch_compile
    if compiles or (compiles is None and device == "cuda"):
        float32_experts = routers_of(model) and DTYPES[settings.compute_dtype] == torch.float32
        model.compiler = Compiler(_BREAKS if float32_experts else "")
        for layer in transformer_layers(model):
            layer.forward = model.compiler(layer.forward)
        if head is not None:
            head.compiler = model.compiler
    if layers is not None and layers.enable_gradient_checkpointing:
        away = functools.partial(saved_in_cpu_memory, device)
        keeping = away if layers.enable_activation_offload else contextlib.nullcontext
        recompute_layers(model, settings.layers_key, keeping)
    return unloaded


def shard(model: Any, settings: ModelSettings, device: str, *, leave_frozen: bool = False) -> None:
    """Shard a model that has no memory yet; `leave_frozen`: but for its weights that do not train."""
    compute, master = DTYPES[settings.compute_dtype], DTYPES[settings.model_dtype]
    policy = MixedPrecisionPolicy(param_dtype=None if compute == master else compute, reduce_dtype=torch.float32)
    shards = num_shards(settings)
    hybrid = (dist.get_world_size() // shards, shards)
    mesh_shape, names = (hybrid, ("replicate", "shard")) if hybrid[0] > 1 else (hybrid[1:], ("shard",))
    mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=names)
    for axis in names if len(names) > 1 else ():  # groups of some of the ranks
        _set_pg_timeout(world_limit(device), mesh.get_group(axis))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshards(settings)}
    if leave_frozen:
        options["ignored_params"] = {weight for weight in model.parameters() if not weight.requires_grad}
    for layer in transformer_layers(model):
        fully_shard(layer, **options)
    if settings.head_apart:
        in_float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(head_modules(model), **options | {"mp_policy": in_float32})
    fully_shard(model, **options)


def recompute_layers(
    model: Any, section: str, keeping: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
) -> None:
    """Have each layer keep only its inputs and compute the rest again in the backward pass.

    transformers' own switch works in training mode only.

    Args:
        keeping: makes the context in which the inputs are kept; what it says of tensors that autograd saves goes for
            them alone, since within a layer `checkpoint` has the say.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layers = layers or transformer_layers(model)

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with keeping():
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    for layer in layers:
        layer.forward = functools.partial(run, layer.forward)
    if not layers:
        raise ConfigError(
            f"{section}.enable_gradient_checkpointing=true: the code of this model does not say what its "
            "layers are (_no_split_modules); set it to false"
        )


def reshards(settings: ModelSettings) -> bool:
    """Tell if gathered weights are freed early. A rank that holds all weights would only copy them again."""
    return settings.reshard_after_forward and num_shards(settings) > 1


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the class names that the model itself says must not be split; FSDP2 adds to these."""
    names, found = set(getattr(model, "_no_split_modules", None) or ()), dict[str, nn.Module]()
    for name, module in model.named_modules():
        within = f"{name}.".startswith(tuple(f"{outer}." for outer in found))  # it is a part of one (Mamba)
        within = within or name.startswith(f"{VISION}.")  # ranks without pictures do not come to its blocks
        if type(module).__name__.removeprefix("FSDP") in names and not within:
            found[name] = module
    return list(found.values())


@contextlib.contextmanager
def gradient_sync(model: Any, settings: ModelSettings, *, last: bool) -> Iterator[None]:
    """A block with one backward pass of a mini-batch, of which it is the `last` or not.

    Gradients are reduced over the ranks that hold a copy of the model together in every pass, so that a rank keeps no
    more of them than its shard. With `defer_grad_sync` that waits for the last pass, and until then a rank keeps whole
    gradients in float32; so it does where its shard is the whole. Over copies (hybrid sharding) shards are reduced in
    the last pass only, which costs no memory. Weights that are not resharded stay gathered between passes.
    """
    defers = settings.fsdp_config.defer_grad_sync or num_shards(settings) == 1
    model.set_requires_gradient_sync(last or not defers)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or reshards(settings))
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)


def hold_longrope_factors(model: Any, max_model_len: int) -> None:
    """Fix LongRoPE's factors (Phi-3; arXiv 2402.13753) for the longest sequence that the run may have.

    transformers takes the long factors for a whole micro-batch if one position is beyond the original length, so that a
    sequence's log-probs would depend on its company. vLLM takes them for all if its `max_model_len` is beyond it.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        factors, scaling = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, max_model_len)
        module.inv_freq, module.attention_scaling = factors, scaling
        module.rope_type = "default"  # its forward pass now leaves the factors alone
