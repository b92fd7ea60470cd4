"""Which changes of the config a checkpoint survives, by command: the table in code of docs/reliability.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_dist.config.command import AnyCommand
from grpo_dist.config.grpo import GRPO as GRPO_COMMAND
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.config.schema_supervised import SupervisedConfig
from grpo_dist.config.supervised import REWARD_MODEL, SFT

Flat = dict[str, Any]

_ACTOR, _ROLLOUT, _REF, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
_CRITIC, _CRITICS_FSDP = "critic", "critic.model.fsdp_config"

# Machines, logging, frequencies, limits of time and memory, and micro-batches: results do not depend on them.
_HARMLESS = (
    "cluster.*",
    "ray_kwargs.*",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.logger*",
    "trainer.console",
    "trainer.default_local_dir",
    "trainer.test_freq",
    "trainer.val_*",
    "trainer.save_*",
    "trainer.keep_best_metric",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.resume_*",
    "trainer.max_*_restarts",
    "trainer.node_wait_minutes",
    "trainer.halve_on_out_of_memory",
    "trainer.export_*",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.worker_timeout_s",
    "trainer.dry_run",
    "data.train_files*",  # the content of the rows is compared instead, by their fingerprint
    "data.train_max_samples",
    "data.val_*",
)
# How results are computed, to rounding: null means another type on another machine, where the same command goes on.
_COMPUTATION = ("*.dtype",)
# The length of the run matters only if the learning rate schedule depends on it, and then it is shown.
LENGTH = ("trainer.total_training_steps", "trainer.total_epochs")
# Pattern -> why the checkpoint cannot be used with another value.
_REFUSED = {
    "trainer.seed": "what is drawn, and the order of the rows, depend on the seed",
    "data.seed": "the order of the rows depends on it",
    "data.shuffle": "the saved position is one in another order of the rows",
}
_OTHER_MODEL = "the saved weights are those of another model"
_OTHER_FACTORS = "the saved factors have another shape or scale"
_OTHER_LAYERS = "the saved factors belong to other modules"
_OTHER_DTYPE = "weights and optimizer states were saved in another dtype"


@dataclass(frozen=True)
class ChangeRules:
    """How configs of a command are compared. A change of any key that is not named here is another experiment.

    Attributes:
        harmless: patterns of keys on which results do not depend: nothing is said.
        shown: patterns of keys that change results, but not the experiment: the run says so and goes on.
        refused: pattern -> why the checkpoint cannot be used with another value, not even on demand.
        optims: the sections of the optimizers, whose schedules may depend on the length of the run.
        resolved: the config as plain values, with null dtypes replaced by the ones that are used.
        effective: the config by dotted key, without keys that have no effect because of other keys.
    """

    harmless: tuple[str, ...]
    shown: tuple[str, ...]
    refused: Mapping[str, str]
    optims: tuple[str, ...]
    resolved: Callable[[Any], dict[str, Any]]
    effective: Callable[[Flat], Flat] = dict


def command_of(config: JobConfig) -> AnyCommand:
    """The command that this config is of."""
    return next(each for each in (GRPO_COMMAND, SFT, REWARD_MODEL) if isinstance(config, each.schema))


def change_rules(config: JobConfig) -> ChangeRules:
    """The rules of the command that this config is of."""
    if isinstance(config, SupervisedConfig):
        return SUPERVISED
    assert isinstance(config, RunConfig)
    if config.reward_model.is_retrained:
        return replace(GRPO, refused={**GRPO.refused, "reward_model.model.path": _OTHER_MODEL})
    return GRPO


def _resolved(config: RunConfig) -> dict[str, Any]:
    roles, default = config.actor_rollout_ref, config.default_dtype
    resolved = config.model_dump(mode="json")
    saved = resolved["actor_rollout_ref"]
    saved["actor"]["fsdp_config"]["dtype"] = roles.actor.fsdp_config.resolved_dtype(default)
    saved["rollout"]["dtype"] = roles.rollout.resolved_dtype(default)
    saved["rollout"]["deterministic"] = roles.rollout.resolved_deterministic(config.device)
    if config.needs_reference_workers:
        saved["ref"]["fsdp_config"]["dtype"] = roles.ref.fsdp_config.resolved_dtype(default)
    if config.reward_model.enable:
        dtype = config.reward_model.model.fsdp_config.resolved_dtype(default)
        resolved["reward_model"]["model"]["fsdp_config"]["dtype"] = dtype
    resolved["critic"]["enable"] = config.needs_critic
    resolved["critic"]["model"]["fsdp_config"]["dtype"] = config.critic.model.fsdp_config.resolved_dtype(default)
    return resolved


def _without_idle_lora(flat: Flat, section: str) -> Flat:
    """Without LoRA's other keys where there is no LoRA."""
    idle = () if flat.get(f"{section}.lora_rank") else ("lora_alpha", "target_modules", "exclude_modules", "lora.merge")
    return {key: value for key, value in flat.items() if key not in {f"{section}.{name}" for name in idle}}


def _effective(flat: Flat) -> Flat:
    flat = _without_idle_lora(flat, _MODEL)
    if not flat.get("reward_model.enable"):
        flat = {key: value for key, value in flat.items() if not key.startswith("reward_model.")}
    if flat.get(f"{_REF}.model.path") is None:
        flat = {key: value for key, value in flat.items() if not key.startswith(f"{_REF}.model.")}
    if not flat.get(f"{_CRITIC}.enable"):
        unused = (f"{_CRITIC}.", "trainer.critic_warmup")
        flat = {key: value for key, value in flat.items() if not key.startswith(unused)}
    return flat


GRPO = ChangeRules(
    harmless=(
        *_HARMLESS,
        "trainer.health.*",
        "trainer.expected_response_length",
        "trainer.log_*",
        "trainer.profile_steps*",
        "trainer.stage_timeout_s.*",
        "actor_rollout_ref.nccl_timeout",
        "reward.num_workers",
        "reward.timeout_s",
        "reward.max_failure_rate",
        "algorithm.filter_groups.max_num_gen_batches",
        f"{_MODEL}.trust_remote_code",
        f"{_MODEL}.lora_adapter_path",  # the checkpoint has the factors that were made of it
        f"{_MODEL}.use_remove_padding",
        f"{_MODEL}.enable_gradient_checkpointing",
        f"{_MODEL}.enable_activation_offload",
        f"{_ACTOR}.checkpoint.*",
        f"{_ACTOR}.*micro_batch_size_per_gpu",
        f"{_ACTOR}.use_dynamic_bsz",
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        f"{_ACTOR}.use_prefix_grouper",
        f"{_ACTOR}.ulysses_sequence_parallel_size",
        f"{_ACTOR}.fsdp_config.*offload",
        f"{_ACTOR}.fsdp_config.reshard_after_forward",
        f"{_ACTOR}.fsdp_config.fsdp_size",
        f"{_ACTOR}.fsdp_config.defer_grad_sync",
        f"{_REF}.*micro_batch_size_per_gpu",
        f"{_REF}.log_prob_*",
        f"{_REF}.ulysses_sequence_parallel_size",
        f"{_REF}.model.trust_remote_code",
        f"{_REF}.fsdp_config.*offload",
        "reward_model.micro_batch_size_per_gpu",
        "reward_model.use_dynamic_bsz",
        "reward_model.forward_max_token_len_per_gpu",
        "reward_model.model.trust_remote_code",
        "reward_model.retrain.*micro_batch_size_per_gpu",
        "reward_model.retrain.max_token_len_per_gpu",
        "reward_model.retrain.enable_gradient_checkpointing",
        "reward_model.retrain.optimizer_offload",
        "reward_model.model.fsdp_config.*offload",
        f"{_CRITIC}.*micro_batch_size_per_gpu",
        f"{_CRITIC}.use_dynamic_bsz",
        f"{_CRITIC}.*max_token_len_per_gpu",
        f"{_CRITIC}.ulysses_sequence_parallel_size",
        f"{_CRITIC}.model.enable_gradient_checkpointing",
        f"{_CRITIC}.model.enable_activation_offload",
        f"{_CRITICS_FSDP}.*offload",
        f"{_CRITICS_FSDP}.reshard_after_forward",
        f"{_CRITICS_FSDP}.fsdp_size",
        f"{_CRITICS_FSDP}.defer_grad_sync",
        f"{_ROLLOUT}.log_prob_*",
        f"{_ROLLOUT}.gpu_memory_utilization",
        f"{_ROLLOUT}.kv_cache_memory_gib",
        f"{_ROLLOUT}.free_cache_engine",
        f"{_ROLLOUT}.tensor_model_parallel_size",
        f"{_ROLLOUT}.max_num_*",
        f"{_ROLLOUT}.enforce_eager",
        f"{_ROLLOUT}.enable_chunked_prefill",
        f"{_ROLLOUT}.startup_timeout_s",
        f"{_ROLLOUT}.checkpoint_engine.*",
        f"{_ROLLOUT}.val_kwargs.*",
        f"{_ROLLOUT}.agent.timeout_s",
    ),
    shown=(
        *_COMPUTATION,
        f"{_ROLLOUT}.deterministic",
        f"{_ROLLOUT}.max_model_len",
        f"{_ROLLOUT}.engine_kwargs.*",
        f"{_MODEL}.lora.merge",
    ),
    refused={
        **_REFUSED,
        f"{_MODEL}.path": _OTHER_MODEL,
        f"{_MODEL}.override_config*": _OTHER_MODEL,
        f"{_MODEL}.lora_*": _OTHER_FACTORS,
        f"{_MODEL}.target_modules*": _OTHER_LAYERS,
        f"{_MODEL}.exclude_modules*": _OTHER_LAYERS,
        f"{_ACTOR}.fsdp_config.model_dtype": _OTHER_DTYPE,
        "reward_model.retrain.freq": "the judged responses of earlier steps are those of the saved iterations",
        "reward_model.retrain.model_dtype": _OTHER_DTYPE,
        f"{_CRITIC}.enable": "a checkpoint has a critic if its run had one",
        f"{_CRITIC}.model.path": _OTHER_MODEL,
        f"{_CRITIC}.model.override_config*": _OTHER_MODEL,
        f"{_CRITICS_FSDP}.model_dtype": _OTHER_DTYPE,
        "data.sampler.*": "the saved position is one in another order of the prompts",
    },
    optims=(f"{_ACTOR}.optim", f"{_CRITIC}.optim"),
    resolved=_resolved,
    effective=_effective,
)


def _resolved_supervised(config: SupervisedConfig) -> dict[str, Any]:
    resolved = config.model_dump(mode="json")
    resolved["engine"]["dtype"] = config.engine.resolved_dtype(config.default_dtype)
    return resolved


SUPERVISED = ChangeRules(
    harmless=(
        *_HARMLESS,
        "trainer.nccl_timeout",
        "model.trust_remote_code",
        "model.lora_adapter_path",
        "model.use_remove_padding",
        "model.enable_gradient_checkpointing",
        "checkpoint.*",
        "data.micro_batch_size_per_gpu",
        "data.use_dynamic_bsz",
        "data.max_token_len_per_gpu",
        "engine.*offload",
        "engine.reshard_after_forward",
        "engine.fsdp_size",
        "engine.defer_grad_sync",
    ),
    shown=_COMPUTATION,
    refused={
        **_REFUSED,
        "model.path": _OTHER_MODEL,
        "model.override_config*": _OTHER_MODEL,
        "model.lora_*": _OTHER_FACTORS,
        "model.target_modules*": _OTHER_LAYERS,
        "model.exclude_modules*": _OTHER_LAYERS,
        "engine.model_dtype": _OTHER_DTYPE,
    },
    optims=("optim",),
    resolved=_resolved_supervised,
    effective=lambda flat: _without_idle_lora(flat, "model"),
)
