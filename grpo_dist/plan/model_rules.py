"""Rules on the models that a config names, and between the config and their config.json: finds early what vLLM or the
GPUs would refuse late.

`model_problems` and `position_problems` run when the config is loaded, where config.json is available locally, and
again once the files of a hub model have been downloaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_dist.assets.model_folder import count, overridden, text_config
from grpo_dist.config.keys import Problem, between_keys, shown, with_values
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.base import rollout_backend
from grpo_dist.plan.memory import memory_problems
from grpo_dist.plan.model_shape import MLP_NAMES, model_config_at_hand, num_experts
from grpo_dist.plan.roles import Model, models_of
from grpo_dist.sizes import heads_split

_MODEL = "actor_rollout_ref.model"
# Entries of config.json that limit the sequence length; vLLM takes the smallest.
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
# Entries of config.json which say that a mixture-of-experts model also has dense MLP layers.
_DENSE_MLPS = ("mlp_only_layers", "first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size")
# RoPE types whose config.json already has the scaled length; for the others vLLM multiplies it by `factor`.
_ALREADY_SCALED = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default"}


def position_problems(config: JobConfig, model: Model, model_config: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Report a model with fewer positions, by its config.json (None: unknown), than the longest sequence it reads."""
    positions = max_positions(overridden(model_config or {}, model.override_config or {}))
    if positions is None or model.longest <= positions[1]:
        return
    lower = "lower one of the lengths" if len(model.lengths) > 1 else "lower the length"
    override = f"{model.key.removesuffix('path')}override_config"
    more = "" if model.override_config is None else f", or extend the positions (RoPE scaling) with {override}"
    why = (
        f"{model.longest} tokens, and {model.path} has {positions[1]} positions ({positions[0]} in its config.json), "
        f"which are not exceeded; {lower}{more}"
    )
    keys = (*model.lengths, model.key)
    yield Problem(f"{with_values(config, ', '.join(f'<{key}>' for key in keys))}: {why}", keys)


def model_problems(
    config: JobConfig,
    model_config: Mapping[str, Any] | None,
    memory_gib: float | None,
    host_gib: float | None = None,
    num_parameters: int = 0,
) -> Iterator[Problem]:
    """Reports settings that do not fit the model; the arguments are those of `memory_problems`."""
    if model_config is None:
        return
    if isinstance(config, RunConfig):
        entries = overridden(model_config, config.actor_rollout_ref.model.override_config)
        yield from between_keys(functools.partial(_engines_split_it, entries=entries))(config)
        yield from _rope_is_set_as_a_whole(config, model_config)
        yield from between_keys(functools.partial(_experts_are_trained_as_asked, entries=entries))(config)
    yield from position_problems(config, models_of(config)[0], model_config)
    yield from memory_problems(config, model_config, memory_gib, host_gib, num_parameters)


def max_positions(model_config: Mapping[str, Any]) -> tuple[str, int] | None:
    """(entry of config.json, longest sequence in tokens), as vLLM derives it; None if config.json does not say."""
    text = text_config(model_config)
    limits = {name: number for name in _POSITIONS if (number := count(text, name))}
    if decides := count(text, "model_max_length"):  # Cohere's models: it overrides the others
        limits = {"model_max_length": decides}
    if not limits:
        return None
    name = min(limits, key=limits.__getitem__)
    scaled = 1.0 if "gemma3" in str(model_config.get("model_type")) else _scaling_factor(text)
    return name, int(limits[name] * scaled)


def _scaling_factor(text: Mapping[str, Any]) -> float:
    """The factor by which RoPE scaling extends the positions. Settings may be nested, one for each layer type."""
    settings = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(settings, Mapping):
        return 1.0
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    factor = 1.0
    for rope in nested or [settings]:
        own = rope.get("factor")
        if rope.get("rope_type", rope.get("type", "default")) not in _ALREADY_SCALED and isinstance(own, int | float):
            factor = float(own)
    return factor


def _engines_split_it(config: RunConfig, entries: Mapping[str, Any]) -> Iterator[str]:
    """Each process gets whole attention heads, whole key-value heads or a copy of one, and a part of each expert."""
    size, text = config.actor_rollout_ref.rollout.tensor_model_parallel_size, text_config(entries)
    heads = next(filter(None, (count(text, name) for name in ("num_attention_heads", "n_head", "n_heads"))), 0)
    kv_heads = count(text, "num_key_value_heads") or heads
    if heads and not heads_split(heads, kv_heads, size):
        per_node = config.trainer.n_gpus_per_node or heads
        of_node = (number for number in range(1, per_node + 1) if per_node % number == 0)
        fitting = " or ".join(str(number) for number in of_node if heads_split(heads, kv_heads, number))
        what = f"{size} {'GPUs' if config.device == 'cuda' else 'processes'}"
        why = f"{heads} attention heads and {kv_heads} key-value heads do not split over {what}; set it to {fitting}"
        yield f"<rollout.tensor_model_parallel_size>, <model.path>: {why}"
    width = count(text, "moe_intermediate_size") or count(text, "intermediate_size")
    if num_experts(text) and width % size:
        why = f"the experts have intermediate size {width}, which {size} does not divide; set a divisor"
        yield f"<rollout.tensor_model_parallel_size>, <model.path>: {why}"


def _experts_are_trained_as_asked(config: RunConfig, entries: Mapping[str, Any]) -> Iterator[str]:
    """The auxiliary loss that balances a router would be computed but not used. LoRA adapts linear layers only, and
    experts are one tensor of a layer.
    """
    model, text = config.actor_rollout_ref.model, text_config(entries)
    key, balance = f"{_MODEL}.override_config", model.override_config.get("router_aux_loss_coef")
    why = "the router's auxiliary loss is not part of the training loss (as in verl), so it would have no effect"
    if text.get("output_router_logits") is True:
        yield f"<model.path>: its config has output_router_logits=true: {why}; set {key}.output_router_logits=false"
    elif balance:
        yield f"{key}.router_aux_loss_coef={balance}: {why}; leave it out"
    in_experts = [name for name in model.target_modules if name in MLP_NAMES]
    if model.trains_factors and in_experts and num_experts(text) and not any(text.get(name) for name in _DENSE_MLPS):
        yield (
            f"<model.target_modules>, <model.path>: {', '.join(in_experts)} are in its experts only, where LoRA cannot "
            "be used; name attention layers, such as q_proj and v_proj, or all-linear, or train all weights with "
            "lora_rank=0"
        )
    if config.replays_routes and not num_experts(text):
        why = "the model has no experts, by its config.json; set the first to disabled"
        yield f"<actor.router_replay.mode>, <model.path>: {why}"
    engine = rollout_backend(config.actor_rollout_ref.rollout.name)
    if config.actor_rollout_ref.model.sends_factors and num_experts(text) and not engine.adapts_experts(config.device):
        why = f"the engine cannot compute experts with adapters on {config.device.upper()}; set merge=true"
        yield f"<model.lora.merge>, <model.path>: {why}"


def _rope_is_set_as_a_whole(config: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Trainer and engines take RoPE's settings from `rope_parameters` as they are there: `rope_theta` beside it has no
    effect, and without one in it the model fails. Models that come with code of their own may read others.
    """
    model, key = config.actor_rollout_ref.model, f"{_MODEL}.override_config"
    changes, text = model.override_config, text_config(model_config)
    scaling = changes.get("rope_parameters", changes.get("rope_scaling"))
    names = [name for name in ("rope_theta", "rope_scaling") if name in changes]
    nested = isinstance(scaling, Mapping) and any(isinstance(value, Mapping) for value in scaling.values())
    incomplete = isinstance(scaling, Mapping) and not nested and "rope_theta" not in scaling
    if model.trust_remote_code or not (names or incomplete):
        return
    own = text["rope_parameters"] if isinstance(text.get("rope_parameters"), Mapping) else {}
    theta = changes.get("rope_theta", text.get("rope_theta", own.get("rope_theta", "THAT_OF_THE_MODEL")))
    whole = {"rope_theta": theta} | (dict(scaling) if isinstance(scaling, Mapping) else {"rope_type": "default"})
    yield Problem(
        f"{key} has {', '.join(names or ['rope_parameters'])}: trainer and engines take RoPE's settings as a whole, "
        f"rope_theta among them, from one entry; set {key}.rope_parameters={shown(whole)} in its place",
        (key,),
    )


def models_take_it(config: JobConfig) -> Iterator[Problem]:
    """Report what the models' config.json rule out, where these are at hand."""
    policy, *others = models_of(config)
    at_hand = model_config_at_hand(policy.path)
    yield from model_problems(config, at_hand, config.cluster.gpu_memory_gib if config.num_gpus else None)
    for model in others:
        yield from position_problems(config, model, model_config_at_hand(model.path))


@between_keys
def experts_stay_frozen(config: RunConfig) -> Iterator[str]:
    """Note what LoRA adapts of a mixture of experts, if config.json is available locally."""
    model = config.actor_rollout_ref.model
    if model.trains_factors and num_experts(text_config(model_config_at_hand(model.path) or {})):
        why = "LoRA adapts the linear layers of a mixture of experts; the experts and their router stay frozen"
        yield f"<model.lora_rank>, <model.path>: {why}"
