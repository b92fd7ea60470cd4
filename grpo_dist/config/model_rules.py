"""Rules between the config and the model's config.json: finds early what vLLM or the GPUs would refuse late.

`model_problems` runs when the config is loaded, if config.json is available locally, and again once the files of a hub
model have been downloaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_dist.config.memory import memory_estimate
from grpo_dist.config.memory_rules import memory_problems
from grpo_dist.config.model_shape import MLP_NAMES, count, num_experts, text_config
from grpo_dist.config.problems import Problem, problem_between, shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.sizes import heads_split

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_LENGTHS = "data.max_prompt_length", "data.max_response_length"
# Entries of config.json that limit the sequence length; vLLM takes the smallest.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Entries of config.json which say that a mixture-of-experts model also has dense MLP layers.
_DENSE_MLPS = ("mlp_only_layers", "first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size")
# RoPE types whose config.json already has the scaled length; for the others vLLM multiplies it by `factor`.
_ALREADY_SCALED = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default"}


def model_problems(
    config: RunConfig,
    model_config: Mapping[str, Any] | None,
    memory_gib: float | None,
    host_gib: float | None = None,
    num_parameters: int = 0,
) -> Iterator[Problem]:
    """Reports settings that do not fit the model.

    Args:
        config: the run's config.
        model_config: the model's config.json; None: unknown, so nothing is checked.
        memory_gib: memory of one GPU, GiB; None: unknown, or there is no GPU.
        host_gib: CPU memory of the machine, GiB, if the whole run is on it; None: unknown.
        num_parameters: see `memory_estimate`.
    """
    if model_config is None:
        return
    found = {**model_config, **config.actor_rollout_ref.model.override_config}
    yield from _tensor_parallel_divides_heads(config, found)
    yield from _tensor_parallel_divides_experts(config, found)
    yield from _rope_is_set_as_a_whole(config, model_config)
    yield from _positions_hold_the_longest_sequence(config, found)
    yield from _no_router_auxiliary_loss(config, found)
    yield from _experts_get_no_lora(config, found)
    yield from _experts_on_cpu_need_merged_factors(config, found)

    def splits(changed: RunConfig) -> bool:
        rules = (_tensor_parallel_divides_heads, _tensor_parallel_divides_experts)
        size = changed.sequence_parallel_size("actor")
        return heads_split(*_heads(found), size) and not any(
            problem for rule in rules for problem in rule(changed, found)
        )

    estimate = functools.partial(memory_estimate, model_config=found, num_parameters=num_parameters)
    yield from memory_problems(config, estimate, memory_gib, host_gib, valid=splits)


def max_positions(model_config: Mapping[str, Any]) -> tuple[str, int] | None:
    """(entry of config.json, longest sequence in tokens), as vLLM derives it; None if config.json does not say."""
    text = text_config(model_config)
    found = {name: number for name in _POSITIONS if (number := count(text, name))}
    if decides := count(text, "model_max_length"):  # Cohere's models: it overrides the others
        found = {"model_max_length": decides}
    if not found:
        return None
    name = min(found, key=lambda each: found[each])
    scaled = 1.0 if "gemma3" in str(model_config.get("model_type")) else _scaling_factor(text)
    return name, int(found[name] * scaled)


def _scaling_factor(text: Mapping[str, Any]) -> float:
    """The factor by which RoPE scaling extends the positions. Settings may be nested, one for each layer type."""
    settings = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(settings, Mapping):
        return 1.0
    nested = [each for each in settings.values() if isinstance(each, Mapping)]
    factor = 1.0
    for each in nested or [settings]:
        own = each.get("factor")
        if each.get("rope_type", each.get("type", "default")) not in _ALREADY_SCALED and isinstance(own, int | float):
            factor = float(own)
    return factor


def _heads(model_config: Mapping[str, Any]) -> tuple[int, int]:
    """Attention heads, and key-value heads; 0 if config.json does not say."""
    text = text_config(model_config)
    heads = next(filter(None, (count(text, name) for name in ("num_attention_heads", "n_head", "n_heads"))), 0)
    return heads, count(text, "num_key_value_heads") or heads


def _tensor_parallel_divides_heads(config: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Tensor parallelism gives each process whole attention heads, and whole key-value heads or a copy of one."""
    size, key = config.actor_rollout_ref.rollout.tensor_model_parallel_size, f"{_ROLLOUT}.tensor_model_parallel_size"
    path, (heads, kv_heads) = config.actor_rollout_ref.model.path, _heads(model_config)
    if not heads or heads_split(heads, kv_heads, size):
        return
    per_node = config.trainer.n_gpus_per_node or heads
    what = "GPUs" if config.device == "cuda" else "processes"
    fitting = [
        number for number in range(1, per_node + 1) if per_node % number == 0 and heads_split(heads, kv_heads, number)
    ]
    yield Problem(
        f"{key}={size}: {path} has {heads} attention heads and {kv_heads} key-value heads, which do not split over "
        f"{size} {what}; set it to {' or '.join(map(str, fitting))}",
        (key, "actor_rollout_ref.model.path"),
    )


def _tensor_parallel_divides_experts(config: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Tensor parallelism splits every expert along its intermediate size."""
    size, key = config.actor_rollout_ref.rollout.tensor_model_parallel_size, f"{_ROLLOUT}.tensor_model_parallel_size"
    text = text_config(model_config)
    width = count(text, "moe_intermediate_size") or count(text, "intermediate_size")
    if num_experts(text) and width % size:
        path = config.actor_rollout_ref.model.path
        why = f"the experts of {path} have intermediate size {width}, which {size} does not divide; set a divisor"
        yield problem_between(config, why, key)


def _no_router_auxiliary_loss(config: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Problem]:
    """The auxiliary loss that balances a router would be computed but not used."""
    text, changes = text_config(model_config), config.actor_rollout_ref.model.override_config
    key, path = f"{_MODEL}.override_config", config.actor_rollout_ref.model.path
    why = "the router's auxiliary loss is not part of the training loss (as in verl), so it would have no effect"
    if text.get("output_router_logits") is True:
        yield Problem(
            f"{_MODEL}.path={path}: its config has output_router_logits=true: {why}; set "
            f"{key}.output_router_logits=false",
            (f"{_MODEL}.path", key),
        )
    elif changes.get("router_aux_loss_coef"):
        yield Problem(
            f"{key}.router_aux_loss_coef={changes['router_aux_loss_coef']}: {why}; leave it out",
            (key,),
        )


def _experts_get_no_lora(config: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Problem]:
    """LoRA adapts linear layers only; the experts of a layer are stored as one tensor."""
    model, text = config.actor_rollout_ref.model, text_config(model_config)
    asked = [name for name in model.target_modules if name in MLP_NAMES]
    if not (model.lora_rank and asked and num_experts(text)) or any(text.get(name) for name in _DENSE_MLPS):
        return
    why = (
        f"{model.path} has {', '.join(asked)} in its experts only, where LoRA cannot be used; name attention layers, "
        "such as q_proj and v_proj, or all-linear, or train all weights with lora_rank=0"
    )
    yield problem_between(config, why, f"{_MODEL}.target_modules")


def _experts_on_cpu_need_merged_factors(config: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Where it has adapters vLLM computes experts by Triton (its fused_moe/oracle/unquantized.py), which CPU lacks."""
    if config.sends_factors and config.device == "cpu" and num_experts(text_config(model_config)):
        why = "with adapters vLLM cannot compute experts on CPU; set it to true"
        yield problem_between(config, why, f"{_MODEL}.lora.merge", f"{_MODEL}.path")


def _rope_is_set_as_a_whole(config: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Trainer and engines take RoPE's settings from `rope_parameters` as they are there: `rope_theta` beside it has no
    effect, and without one in it the model fails. Models that come with code of their own may read others.
    """
    model, key = config.actor_rollout_ref.model, f"{_MODEL}.override_config"
    changes, text = model.override_config, text_config(model_config)
    scaling = changes.get("rope_parameters", changes.get("rope_scaling"))
    names = [name for name in ("rope_theta", "rope_scaling") if name in changes]
    nested = isinstance(scaling, Mapping) and any(isinstance(each, Mapping) for each in scaling.values())
    incomplete = isinstance(scaling, Mapping) and not nested and "rope_theta" not in scaling
    if model.trust_remote_code or not (names or incomplete):
        return
    own = text.get("rope_parameters")
    own = own if isinstance(own, Mapping) else {}
    theta = changes.get("rope_theta", text.get("rope_theta", own.get("rope_theta", "THAT_OF_THE_MODEL")))
    whole = {"rope_theta": theta} | (dict(scaling) if isinstance(scaling, Mapping) else {"rope_type": "default"})
    yield Problem(
        f"{key} has {', '.join(names or ['rope_parameters'])}: transformers and vLLM take RoPE's settings as a whole, "
        f"rope_theta among them, from one entry; set {key}.rope_parameters={shown(whole)} in its place",
        (key,),
    )


def _positions_hold_the_longest_sequence(config: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Problem]:
    """VLLM refuses sequences longer than the model's positions, unless VLLM_ALLOW_LONG_MAX_MODEL_LEN is set."""
    rollout, positions = config.actor_rollout_ref.rollout, max_positions(model_config)
    longest = config.max_model_len
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")
    if positions is None or longest <= positions[1] or allowed:
        return
    keys = _LENGTHS if rollout.max_model_len is None else (f"{_ROLLOUT}.max_model_len",)
    values = (
        (config.data.max_prompt_length, config.data.max_response_length) if len(keys) > 1 else (rollout.max_model_len,)
    )
    shown = ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    yield Problem(
        f"{shown}: {longest} tokens, and {config.actor_rollout_ref.model.path} has {positions[1]} positions "
        f"({positions[0]} in its config.json), which vLLM does not exceed; lower "
        f"{'one of the two' if len(keys) > 1 else 'it'}, or extend the positions (RoPE scaling) with "
        "actor_rollout_ref.model.override_config",
        (*keys, "actor_rollout_ref.model.path"),
    )
