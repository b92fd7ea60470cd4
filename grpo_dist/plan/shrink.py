"""A run made small enough to be rehearsed on the CPUs of a laptop: its config, and its models' config.json.

What decides which code runs stays as it is. Lengths, sizes and numbers of processes become small, and stay above one
where they were above one: ranks, mini-batches, micro-batches, responses of a prompt, layers of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_dist.config.keys import shown, value_of, with_value
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import ULYSSES
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import ROLES, Role, held_by, roles_of

PROMPTS, GROUP, RESPONSE, TURN, STEPS = 4, 4, 256, 16, 3
HIDDEN, INTERMEDIATE, EXPERTS = 256, 512, 8
_ROLLOUT = "actor_rollout_ref.rollout"
# What a rehearsal sets: this machine, three steps with all that may come after one, and none of a second chance.
_SET: dict[str, Any] = {
    "trainer.n_gpus_per_node": 0,
    "trainer.nnodes": 1,
    **dict.fromkeys(("cluster.max_rollout_world_size", "cluster.colocate", "cluster.num_cpus_per_worker")),
    **dict.fromkeys(("cluster.num_threads_per_worker", "ray_kwargs.ray_init.address", "ray_kwargs.ray_init.num_cpus")),
    **dict.fromkeys((f"{_ROLLOUT}.max_model_len", f"{_ROLLOUT}.dtype")),
    f"{_ROLLOUT}.checkpoint_engine.backend": None,
    f"{_ROLLOUT}.free_cache_engine": False,
    f"{_ROLLOUT}.temperature": 1.0,  # that of the log-probs of given answers
    "actor_rollout_ref.model.lora_adapter_path": None,
    "trainer.total_training_steps": STEPS,
    "trainer.test_freq": STEPS,
    "trainer.val_before_train": False,
    "trainer.save_freq": 1,
    "trainer.max_actor_ckpt_to_keep": 2,
    "trainer.resume_mode": "auto",
    "trainer.export_hf_model": True,
    "trainer.max_worker_restarts": 0,
    "trainer.max_actor_restarts": 0,
    f"{_ROLLOUT}.agent.max_attempts": 1,
    "trainer.stage_timeout_s": {},
    "trainer.rehearse": False,
    **dict.fromkeys(("trainer.save_interval_minutes", "trainer.stop_at", "trainer.resume_from_path")),
    **dict.fromkeys(("trainer.profile_steps", "trainer.push_to_hub")),
}
# What it lowers, where it is more; in `_ALL` what is not positive stands for all there is.
_AT_MOST: dict[str, float] = {
    "data.train_batch_size": PROMPTS,
    "data.gen_batch_size": 2 * PROMPTS,
    "data.train_max_samples": 512,  # of rows that have all been read
    "data.val_max_samples": PROMPTS,
    "data.max_response_length": RESPONSE,
    f"{_ROLLOUT}.n": GROUP,
    f"{_ROLLOUT}.max_num_seqs": 64,
    f"{_ROLLOUT}.kv_cache_memory_gib": 1.0,
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    f"{_ROLLOUT}.val_kwargs.n": 2,
    f"{_ROLLOUT}.agent.timeout_s": 75.0,  # a server that is not there is waited for first
    "algorithm.filter_groups.max_num_gen_batches": 10,
    "algorithm.min_group_size": GROUP,
    "actor_rollout_ref.ref.ref_model_sync_steps": 1,
    "reward.timeout_s": 60.0,
    "reward.num_workers": 2,
    "reward.overlong_buffer.len": RESPONSE // 2,
    "reward_model.retrain.freq": 1,
    "reward_model.retrain.train_batch_size": PROMPTS,
    "reward_model.retrain.micro_batch_size_per_gpu": 2,
}
_ALL = ("data.train_max_samples", "data.val_max_samples", "algorithm.filter_groups.max_num_gen_batches")
# Arguments of engines that only GPUs take.
_OF_GPUS = ("quantization", "kv_cache_dtype", "attention_backend", "attention_config", "compilation_config")
_OF_SHARDS = {"param_offload": False, "optimizer_offload": False, "fsdp_size": -1, "dtype": None}


def shrunk_config(config: RunConfig, folder: str) -> tuple[RunConfig, list[str]]:
    """Return the config of a rehearsal in `folder`, with the run's models still, and what differs, a line each."""
    smaller, changed = config, []
    lacking = tuple(f"{row.section}." for row in ROLES.values() if row.section and not row.present(config))
    lacking += () if config.algorithm.filter_groups.enable else ("algorithm.filter_groups.",)
    values = _SET | dict(_lowered(config)) | {"trainer.default_local_dir": f"{folder}/run"}
    values = {key: value for key, value in values.items() if not key.startswith(lacking)}
    for key, value in values.items():
        smaller = with_value(smaller, key, value)
    values |= dict(_of_roles(config, smaller))
    for key, value in values.items():
        if (before := value_of(config, key)) != value:
            smaller = with_value(smaller, key, value)
            changed.append(f"{key}: {shown(before)} -> {shown(value)}")
    return smaller, changed


def _lowered(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for key, most in _AT_MOST.items():
        value = value_of(config, key)
        if value is not None and (value > most or (value <= 0 and key in _ALL)):
            yield key, type(value)(most)
    agent = config.actor_rollout_ref.rollout.agent
    if agent.default_agent_loop == "tool_agent":  # each call of a tool that hangs takes that long
        yield f"{_ROLLOUT}.agent.agent_kwargs", {"tool_timeout_s": 20.0} | agent.agent_kwargs
    kwargs = value_of(config, f"{_ROLLOUT}.engine_kwargs")
    kept = {name: {k: v for k, v in given.items() if k not in _OF_GPUS} for name, given in kwargs.items()}
    yield f"{_ROLLOUT}.engine_kwargs", kept


def _of_roles(config: RunConfig, smaller: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield how many ranks, mini-batches and micro-batches each role has: two where there are more than one."""
    ranks, prompts = min(placement(config).actor_world_size, 2), smaller.data.train_batch_size
    micro_batch = max(1, prompts * smaller.actor_rollout_ref.rollout.n // 4)
    for row in roles_of(config):
        yield from _of_gpus(config, row)
        if row.size_key.startswith("cluster."):
            yield row.size_key, ranks if row.name == "actor" else None
        for name, value in value_of(config, row.section) if row.section else ():
            if name == "ppo_mini_batch_size":
                yield f"{row.section}.{name}", prompts // (2 if config.data.train_batch_size > value else 1) or 1
            elif name.endswith("micro_batch_size_per_gpu"):
                yield f"{row.section}.{name}", min(value, micro_batch)
            elif name.endswith("max_token_len_per_gpu") and value is not None:
                yield f"{row.section}.{name}", smaller.max_model_len
            elif name == ULYSSES:
                yield f"{row.section}.{name}", min(value, ranks)


def _of_gpus(config: RunConfig, row: Role) -> Iterator[tuple[str, Any]]:
    """Yield what a role does for the memory of GPUs, and how long it trains before others."""
    for name, value in _OF_SHARDS.items() if row.fsdp else ():
        if hasattr(value_of(config, row.fsdp), name):
            yield f"{row.fsdp}.{name}", value
    for section in (model.key.removesuffix(".path") for model in held_by(config, row)):
        if hasattr(value_of(config, section), "enable_activation_offload"):
            yield f"{section}.enable_activation_offload", False
    if getattr(config.trainer, warmup := f"{row.name}_warmup", 0) > 1:
        yield f"trainer.{warmup}", 1


# --- models ----------------------------------------------------------------------------------------------------------
# By what it says: the names that families give it in config.json.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_CAPS = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "shared_expert_intermediate_size"), INTERMEDIATE),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size_mlp"), INTERMEDIATE // 2),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_top_k", "moe_topk")
_KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types")
_PERIODS = ("full_attention_interval", "attn_layer_period", "expert_layer_period", "decoder_sparse_step")


def shrunk_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a small model of the same architecture.

    Vocabulary, head size, kinds of layers and what else the file says stay; the ratio of heads stays where the file
    names the head size, and else as far as `HIDDEN` allows. What is beside a language part has two layers at most.
    """
    if isinstance(config.get("text_config"), Mapping):
        parts = {name: part for name, part in config.items() if isinstance(part, Mapping) and name.endswith("_config")}
        few = {
            name: {**part, **{k: min(part[k], 2) for k in (*_LAYERS, "depth") if k in part}}
            for name, part in parts.items()
        }
        return {**config, **few, "text_config": shrunk_model(parts["text_config"])}
    small = {**config}
    layers = next((small[name] for name in _LAYERS if isinstance(small.get(name), int)), 0)
    kept, experts = min(layers, _num_layers(small, layers)), max(EXPERTS, 2 * (small.get("n_group") or 1))
    for name, value in config.items():
        if name in _LAYERS:
            small[name] = kept
        elif isinstance(value, list | str) and len(value) == layers and (name in _KINDS or isinstance(value, list)):
            small[name] = value[:kept]
        elif name == "per_layer_config" and isinstance(value, Mapping):
            small[name] = {layer: value[layer] for layer in value if int(layer) < kept}
        elif name in _CAPS and isinstance(value, int):
            small[name] = min(value, _CAPS[name])
        elif name in _EXPERTS and isinstance(value, int):
            small[name] = min(value, experts)
        elif name in _CHOSEN and isinstance(value, int):
            small[name] = min(value, experts // 2)
    if isinstance(small.get("first_k_dense_replace"), int):
        small["first_k_dense_replace"] = min(small["first_k_dense_replace"], 1)
    if isinstance(small.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [layer for layer in small["mlp_only_layers"] if layer < kept]
    return small | _heads(small)


def _num_layers(config: Mapping[str, Any], layers: int) -> int:
    """The first layers that have all kinds, at least 2."""
    kinds = next((config[name] for name in _KINDS if len(config.get(name) or ()) == layers), ())
    all_kinds = next((count for count in range(1, layers + 1) if set(kinds[:count]) == set(kinds)), 1) if kinds else 1
    return max(2, all_kinds, *(config.get(name) or 1 for name in _PERIODS))


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Hidden size and numbers of heads."""
    hidden_name = next((name for name in _HIDDEN if isinstance(config.get(name), int)), "")
    heads_name = next((name for name in _HEADS if isinstance(config.get(name), int)), "")
    if not hidden_name or not heads_name:
        return {}
    hidden, heads = config[hidden_name], config[heads_name]
    groups = config.get("num_key_value_heads") or heads
    if config.get("head_dim"):
        kept = min(groups, 2)
        small = {hidden_name: min(hidden, HIDDEN), heads_name: heads // groups * kept}
    else:
        size = hidden // heads
        few = min(heads, max(2, HIDDEN // size))
        kept = max(1, min(groups, few * groups // heads))
        few -= few % kept
        small = {hidden_name: few * size, heads_name: few}
    return small | ({"num_key_value_heads": kept} if "num_key_value_heads" in config else {})
