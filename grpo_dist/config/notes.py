"""Notes on valid settings that may not do what the user expects, shown once at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from grpo_dist.config.engine_arguments import engine_notes
from grpo_dist.config.model_shape import model_config_at_hand, num_experts, text_config
from grpo_dist.config.placement import placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.config.schema_roles import OptimConfig
from grpo_dist.names import SEQUENCE_LOSSES

_ACTOR = "actor_rollout_ref.actor"


def config_notes(config: RunConfig) -> list[str]:
    """All notes on a config, one line each."""
    return [
        *_method(config),
        *engine_notes(config),
        *_experts(config),
        *_without_effect(config),
        *_reward(config),
        *_run(config),
    ]


def notes_of_a_job(
    config: JobConfig, optim: tuple[str, OptimConfig], offloads: Mapping[str, bool], timeout: tuple[str, int]
) -> Iterator[str]:
    """Notes on keys that all commands have.

    Args:
        config: the run's config.
        optim: the key of the section of the optimizer, and the section.
        offloads: keys that move something to CPU memory, and whether they are set.
        timeout: the key of the timeout of collective operations, and its value in seconds.
    """
    trainer, (section, schedule) = config.trainer, optim
    if schedule.lr_warmup_steps >= 0 and schedule.lr_warmup_steps_ratio > 0:
        yield f"{section}.lr_warmup_steps_ratio has no effect while lr_warmup_steps is not -1"
    if schedule.lr_scheduler_type == "constant" and schedule.min_lr_ratio > 0:
        yield f"{section}.min_lr_ratio has no effect with lr_scheduler_type=constant"
    for key, offload in offloads.items():
        if offload and config.device == "cpu":
            yield f"{key}=true has no effect on CPU"
    if config.cluster.gpu_memory_gib is not None and config.device == "cpu":
        yield f"cluster.gpu_memory_gib={config.cluster.gpu_memory_gib:g} has no effect on CPU"
    key, wait = timeout
    if wait >= trainer.worker_timeout_s:
        yield (
            f"{key}={wait} has no effect: after trainer.worker_timeout_s={trainer.worker_timeout_s:g} seconds the "
            "ranks count as hung anyway"
        )
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        yield f"trainer.resume_from_path has no effect with resume_mode={trainer.resume_mode}"
    if trainer.keep_best_metric is not None and trainer.save_freq > 0 and trainer.save_freq % trainer.test_freq:
        yield (
            f"trainer.keep_best_metric: only checkpoints of validated steps can be the best; with save_freq="
            f"{trainer.save_freq} and test_freq={trainer.test_freq} some steps are saved without validation"
        )


def _experts(config: RunConfig) -> Iterator[str]:
    """Notes on mixture-of-experts models, if config.json is available locally."""
    model = config.actor_rollout_ref.model
    if model.lora_rank and num_experts(text_config(model_config_at_hand(model.path) or {})):
        yield (
            f"actor_rollout_ref.model.lora_rank={model.lora_rank}: {model.path} is a mixture of experts; LoRA "
            "adapts its linear layers, while the experts and their router stay frozen"
        )


def _method(config: RunConfig) -> Iterator[str]:
    """Notes on the algorithm."""
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and actor.kl_loss_type in ("k1", "kl"):
        yield (
            f"{_ACTOR}.kl_loss_type={actor.kl_loss_type}: as a loss its gradient has mean zero, so it "
            "does not regularise; use k2 or k3 (low_var_kl)"
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield f"{_ACTOR}.kl_loss_coef=0: the reference runs only to report the KL; use_kl_loss=false saves its cost"
    if actor.policy_loss.loss_mode in SEQUENCE_LOSSES and actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={actor.policy_loss.loss_mode} is published with loss_agg_mode="
            f"seq-mean-token-mean; loss_agg_mode={actor.loss_agg_mode} weighs long responses differently"
        )
    rollout = config.actor_rollout_ref.rollout
    options = {
        "top_p": rollout.top_p < 1,
        "top_k": rollout.top_k > 0,
        "min_p": rollout.min_p > 0,
        "min_tokens": rollout.min_tokens > 0,
        "bad_words": bool(rollout.bad_words),
    }
    if cuts := [name for name, cut in options.items() if cut]:
        yield (
            f"actor_rollout_ref.rollout.{cuts[0]}: responses are sampled from a truncated distribution, but the "
            "trainer's log-probs are of the full one; training/rollout_probs_diff_* shows the difference, "
            "algorithm.rollout_correction corrects for it"
        )
    stale, correction = config.trainer.max_staleness, config.algorithm.rollout_correction
    if stale and config.rollout_is is None and not correction.bypass_mode:
        yield (
            f"trainer.max_staleness={stale}: responses may be {stale} updates old, and with "
            "algorithm.rollout_correction.rollout_is=null nothing corrects for it; set it to auto"
        )
    if rollout.over_sample_rate:
        yield (
            f"actor_rollout_ref.rollout.over_sample_rate={rollout.over_sample_rate:g}: the slowest groups are aborted, "
            "so batches are biased towards short responses, and a run cannot be repeated exactly with the same seed"
        )
    if config.algorithm.adv_estimator == "gae" and not config.needs_critic:
        yield "algorithm.adv_estimator=gae, critic.enable=false: there is no critic, so all values are 0"


def _without_effect(config: RunConfig) -> Iterator[str]:
    """Notes on keys that have no effect because of other keys."""
    actor, ref, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.trainer
    offloads = {
        f"{_ACTOR}.fsdp_config.param_offload": actor.fsdp_config.param_offload,
        f"{_ACTOR}.fsdp_config.optimizer_offload": actor.fsdp_config.optimizer_offload,
        "actor_rollout_ref.ref.fsdp_config.param_offload": ref.fsdp_config.param_offload,
        "reward_model.model.fsdp_config.param_offload": config.reward_model.model.fsdp_config.param_offload,
        "critic.model.fsdp_config.param_offload": config.critic.model.fsdp_config.param_offload,
        "critic.model.fsdp_config.optimizer_offload": config.critic.model.fsdp_config.optimizer_offload,
        "actor_rollout_ref.model.enable_activation_offload": config.actor_rollout_ref.model.enable_activation_offload,
    }
    model = config.actor_rollout_ref.model
    if not model.lora.merge and not model.lora_rank:
        yield "actor_rollout_ref.model.lora.merge=false has no effect without LoRA (actor_rollout_ref.model.lora_rank)"
    if trainer.critic_warmup and not config.needs_critic:
        yield f"trainer.critic_warmup={trainer.critic_warmup} has no effect without a critic"
    timeout = ("actor_rollout_ref.nccl_timeout", config.actor_rollout_ref.nccl_timeout)
    yield from notes_of_a_job(config, (f"{_ACTOR}.optim", actor.optim), offloads, timeout)
    rollout = config.actor_rollout_ref.rollout
    for name in ("partial_rollout", "clear_kv_cache_on_update"):
        if not trainer.max_staleness and not getattr(rollout, name):
            yield f"actor_rollout_ref.rollout.{name}=false has no effect with trainer.max_staleness=0"
    if config.data.sampler.class_path is not None and config.data.shuffle:
        yield "data.shuffle has no effect on the order: data.sampler.class_path decides it"


def _reward(config: RunConfig) -> Iterator[str]:
    """Notes on keys of the reward that have no effect."""
    if config.reward_model.model.path is not None and not config.reward_model.enable:
        yield "reward_model.model.path has no effect while reward_model.enable=false"
    scored = {
        "reward_model.enable": config.reward_model.enable,
        "reward.overlong_buffer.enable": config.reward.overlong_buffer.enable,
    }
    for key in (key for key, is_set in scored.items() if is_set and not config.trains_on_scores):
        estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
        yield f"{key}=true trains nothing with {estimator}: only the KL does"
    if config.custom_reward_function.path is None and config.custom_reward_function.reward_kwargs:
        yield "custom_reward_function.reward_kwargs has no effect while custom_reward_function.path is null"


def _run(config: RunConfig) -> Iterator[str]:
    """Notes on validation, checkpoints and machines."""
    trainer, share = config.trainer, config.actor_rollout_ref.rollout.gpu_memory_utilization
    if not config.data.val_files:
        yield "data.val_files=null: no validation"
    if trainer.total_training_steps is not None and trainer.save_freq > trainer.total_training_steps:
        yield f"trainer.save_freq={trainer.save_freq} exceeds the steps of the run: one checkpoint, after the last step"
    if config.actor_rollout_ref.rollout.free_cache_engine and not placement(config).shares_gpu:
        where = "on CPU" if config.device == "cpu" else "where engines have GPUs of their own"
        yield f"actor_rollout_ref.rollout.free_cache_engine=true has no effect {where}"
    asleep = config.actor_rollout_ref.rollout.free_cache_engine
    if placement(config).shares_gpu and share > 0.5 and not asleep:
        yield (
            f"actor_rollout_ref.rollout.gpu_memory_utilization={share}: the actor shares the GPU; set 0.5 or less, or "
            "actor_rollout_ref.rollout.free_cache_engine=true"
        )
