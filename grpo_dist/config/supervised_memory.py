"""Estimates the memory of a rank that trains one model, and checks it against the GPUs and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from grpo_dist.assets import TRAINED_MODEL_KEY
from grpo_dist.config.memory import DTYPE_BYTES, RoleMemory, host_memory, in_gib
from grpo_dist.config.memory_remedies import Settings, fitting_settings
from grpo_dist.config.model_shape import model_shape
from grpo_dist.config.problems import Problem, value_of
from grpo_dist.config.rank_memory import CUDA_GIB, MiniBatch, Rank
from grpo_dist.config.schema_supervised import SFTConfig, SupervisedConfig
from grpo_dist.sizes import GIB

# Tried in this order: cheapest first.
_REMEDIES: Mapping[str, tuple[Any, ...]] = {
    "engine.defer_grad_sync": (False,),
    "engine.reshard_after_forward": (True,),
    "model.enable_gradient_checkpointing": (True,),
    "data.micro_batch_size_per_gpu": (64, 32, 16, 8, 4, 2, 1),
    "data.max_token_len_per_gpu": (65536, 32768, 16384, 8192, 4096, 2048, 1024),
    "engine.optimizer_offload": (True,),
    "engine.param_offload": (True,),
}
_MORE_GPUS: Mapping[str, tuple[Any, ...]] = {
    "trainer.n_gpus_per_node": (2, 4, 8),
    "trainer.nnodes": (2, 4, 8, 16, 32),
}


def memory_estimate(
    config: SupervisedConfig, model_config: Mapping[str, Any] | None, num_parameters: int = 0
) -> RoleMemory | None:
    """Memory of one rank; None if the model's sizes are unknown.

    Args:
        config: the run's config.
        model_config: the model's config.json.
        num_parameters: parameters of a causal LM in its weight files; 0: unknown, so they are computed.
    """
    shape = None if model_config is None else model_shape(model_config, num_parameters)
    if shape is None:
        return None
    engine, data, is_lm = config.engine, config.data, isinstance(config, SFTConfig)
    rank = Rank(
        shape if is_lm else replace(shape, tied=True),  # a reward model has no output layer to speak of
        config.device,
        master=DTYPE_BYTES[engine.model_dtype],
        compute=DTYPE_BYTES[engine.resolved_dtype(config.default_dtype)],
        shards=engine.num_shards(config.world_size),
        reshards=engine.reshard_after_forward,
        factors=shape.lora_parameters(config.model) if isinstance(config, SFTConfig) else 0,
    )
    # the answers of a pair stay together, so a pass of a reward model has two sequences at least
    least = data.max_length * (1 if is_lm else 2)
    tokens = max(least, data.max_token_len or data.micro_batch_size_per_gpu * data.max_length)
    batch = MiniBatch(
        rank,
        tokens,
        tokens if is_lm else 0,
        recomputes=config.model.enable_gradient_checkpointing,
        defers=engine.defer_grad_sync,
        offloads=engine.optimizer_offload,
        has_output_layer=is_lm,
    )
    offloaded = rank.weights * engine.param_offload + rank.states * engine.optimizer_offload
    host = host_memory(
        rank, offloaded=offloaded, copied=rank.weights + rank.states, exports=config.trainer.export_hf_model
    )
    peak = rank.forward(tokens, tokens if is_lm else 0) if config.trainer.val_only else batch.peak()
    return RoleMemory(
        config.role,
        in_gib(peak),
        host=host,
        saved=(rank.weights + rank.states) * rank.shards / GIB,
        exported=rank.shape.num_parameters * DTYPE_BYTES[config.export_dtype] / GIB,
    )


def memory_problems(
    config: SupervisedConfig,
    model_config: Mapping[str, Any] | None,
    gib: float | None,
    host_gib: float | None,
    *,
    valid: Callable[[SupervisedConfig], bool],
    num_parameters: int = 0,
) -> Iterator[Problem]:
    """Reports ranks that do not fit in memory, and settings with which they would.

    Args:
        config: the run's config.
        model_config: the model's config.json.
        gib: memory of one GPU, GiB; None: unknown.
        host_gib: CPU memory of the machine that runs all ranks, GiB; None: unknown.
        valid: whether a changed config may be suggested.
        num_parameters: see `memory_estimate`.
    """

    def misfits(changed: SupervisedConfig) -> list[tuple[str, float]]:
        return list(_misfits(changed, memory_estimate(changed, model_config, num_parameters), gib, host_gib))

    def excess(changed: SupervisedConfig) -> float:
        return sum(more for _, more in misfits(changed)) if valid(changed) else float("inf")

    if not (found := misfits(config)):
        return

    fitting = fitting_settings(config, _tried(config, _REMEDIES), _tried(config, _MORE_GPUS), excess)
    advice = f"set {fitting}" if fitting else "use a smaller model, larger GPUs, or more machines (trainer.nnodes)"
    texts = "; ".join(text for text, _ in found)
    keys = (TRAINED_MODEL_KEY, "trainer.n_gpus_per_node", "cluster.gpu_memory_gib")
    yield Problem(f"{TRAINED_MODEL_KEY}={config.model.path}: {texts}; {advice}", keys)


def _misfits(
    config: SupervisedConfig, role: RoleMemory | None, gib: float | None, host_gib: float | None
) -> Iterator[tuple[str, float]]:
    """What needs more than there is, and how much more, GiB."""
    if role is None:
        return
    parts = " + ".join(f"{name} {size:.3g}" for name, size in role.parts.items() if size)
    if config.device == "cuda" and gib is not None and role.total > gib - CUDA_GIB:
        asked = config.cluster.gpu_memory_gib
        of = f"the {gib:.3g} GiB of a GPU" if asked is None else f"cluster.gpu_memory_gib={asked:g}"
        limit = gib - CUDA_GIB
        yield (
            f"each rank needs {parts} = {role.total:.3g} GiB, which is more than {limit:.3g} GiB, {CUDA_GIB:g} GiB "
            f"less than {of}",
            role.total - limit,
        )
    each = role.host_total + (role.total if config.device == "cpu" else 0.0)
    needed = each * config.world_size / config.trainer.nnodes
    if host_gib is not None and needed > host_gib:
        what = f"{config.world_size} ranks with {each:.3g} GiB need {needed:.3g} GiB of CPU memory a machine"
        yield f"{what}, and it has {host_gib:.3g} GiB", needed - host_gib


def _tried(config: SupervisedConfig, remedies: Mapping[str, tuple[Any, ...]]) -> Settings:
    """The values that differ from the present ones towards less memory, or more GPUs."""
    unused = "data.micro_batch_size_per_gpu" if config.data.use_dynamic_bsz else "data.max_token_len_per_gpu"
    more_gpus = config.device == "cuda" and config.cluster.world_size is None
    found = {}
    for key, values in remedies.items():
        now = value_of(config, key)
        if key.startswith("trainer."):
            found[key] = [value for value in values if more_gpus and value > now]
        elif isinstance(now, bool):
            found[key] = [value for value in values if value != now]
        else:
            found[key] = [value for value in values if key != unused and value < now]
    return found
