"""The composition root: a config becomes started workers and a trainer.

All names in the config are resolved, and all prompts read, before a worker does any work. The roles start together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_dist.algorithms.advantage import ADVANTAGE
from grpo_dist.algorithms.kl import KL
from grpo_dist.algorithms.policy_loss import POLICY_LOSS
from grpo_dist.assets import resolve_model_path
from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.prompts import load_prompts
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.data.tokenize import load_tokenizer, tokenize_prompts
from grpo_dist.engines.settings import (
    EngineSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    SamplingSettings,
)
from grpo_dist.registry import absolute
from grpo_dist.rewards import check_data_sources, load_reward_function
from grpo_dist.tracking.base import Trackers
from grpo_dist.tracking.console import Progress
from grpo_dist.trainer.trainer import GRPOTrainer, Prompts, Roles
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.groups import ActorGroup, PolicyGroup, RewardPool, RolloutGroup
from grpo_dist.workers.policy import ActorWorker, PolicySettings, PolicyWorker
from grpo_dist.workers.resources import reserve
from grpo_dist.workers.reward import RewardSettings, RewardWorker
from grpo_dist.workers.rollout import RolloutWorker

# Ray's limit on concurrent calls of one rollout worker; the engine itself queues what it cannot run yet.
MAX_PROMPTS_IN_FLIGHT = 10_000


def resolve_names(config: RunConfig) -> None:
    """Import every function the config names.

    Raises:
        ConfigError: one of them does not exist.
    """
    actor, reward = config.actor_rollout_ref.actor, config.custom_reward_function
    ADVANTAGE.get(config.algorithm.adv_estimator)
    KL.get(actor.kl_loss_type)
    POLICY_LOSS.get(actor.policy_loss.loss_mode)
    load_reward_function(reward.path, reward.name, reward.reward_kwargs)


def load_run_prompts(config: RunConfig) -> tuple[Prompts, list[str]]:
    """Read and tokenize the prompts; also what the user should know about them.

    Raises:
        DataError: a file, a row or the tokenizer is unusable.
        ConfigError: a data source has no scorer.
    """
    data, model = config.data, config.actor_rollout_ref.model
    tokenizer = load_tokenizer(resolve_model_path(model.path), trust_remote_code=model.trust_remote_code)
    loaded, notes = [], []
    for key, files, most in (
        ("data.train_files", data.train_files, data.train_max_samples),
        ("data.val_files", data.val_files or (), data.val_max_samples),
    ):
        prompts = load_prompts(
            files,
            key=key,
            prompt_key=data.prompt_key,
            reward_fn_key=data.reward_fn_key,
            max_samples=most,
            shuffle_seed=config.data_seed if data.shuffle and key == "data.train_files" else None,
        )
        tokenized, num_filtered = tokenize_prompts(
            prompts,
            tokenizer,
            max_prompt_length=data.max_prompt_length,
            truncation=data.truncation,
            filter_overlong_prompts=data.filter_overlong_prompts,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        )
        if num_filtered:
            notes.append(
                f"{key}: {num_filtered} of {len(prompts)} prompts are longer than data.max_prompt_length="
                f"{data.max_prompt_length} tokens and were left out"
            )
        if config.custom_reward_function.path is None:
            check_data_sources(prompt.data_source for prompt in prompts)
        loaded.append(tokenized)
    sampler = PromptSampler(len(loaded[0]), data.train_batch_size, shuffle=data.shuffle, seed=config.data_seed)
    return Prompts(loaded[0], loaded[1], sampler), notes


def total_steps(config: RunConfig, prompts: Prompts) -> int:
    """Training steps: trainer.total_training_steps, else total_epochs over the prompts."""
    return config.trainer.total_training_steps or config.trainer.total_epochs * prompts.sampler.steps_per_epoch


class Workers:
    """All worker processes of a run, from reservation to shutdown."""

    def __init__(self, config: RunConfig) -> None:
        """Start the processes; they import what they need while the driver reads the prompts."""
        self.config, self.place = config, placement(config)
        self._placement_group, bundles = reserve(_resources(config, self.place))
        common: dict[str, Any] = {"env": _environment(self.place), "timeout_s": config.trainer.worker_timeout_s}

        def spawn(role: str, worker_class: type, **options: Any) -> WorkerGroup:
            size = len(bundles[role])
            args = [(rank, size) if issubclass(worker_class, PolicyWorker) else () for rank in range(size)]
            return WorkerGroup.spawn(role, worker_class, bundles[role], args=args, **common, **options)

        self.rollout = spawn("rollout", RolloutWorker, max_concurrency=MAX_PROMPTS_IN_FLIGHT)
        self.actor = spawn("actor", ActorWorker)
        self.ref = spawn("ref", PolicyWorker) if self.place.ref_world_size else None
        self.reward = spawn("reward", RewardWorker)

    @property
    def groups(self) -> list[WorkerGroup]:
        """All of them."""
        return [g for g in (self.rollout, self.actor, self.ref, self.reward) if g is not None]

    def start(self, num_steps: int) -> Roles:
        """Load models and engines, all at the same time, and wait until every process is ready."""
        config, place = self.config, self.place
        ref = PolicyGroup(self.ref) if self.ref is not None else None
        roles = Roles(ActorGroup(self.actor), RolloutGroup(self.rollout), RewardPool(self.reward), ref)
        engines = [_engine_settings(config, place, i) for i in range(place.num_engines)]
        calls = roles.rollout.submit_start(engines)
        calls += roles.actor.submit_start(policy_settings(config, place, num_steps))
        calls += ref.submit_start(reference_settings(config, place)) if ref is not None else []
        calls += roles.reward.submit_start(reward_settings(config))
        self.actor.gather(calls, timeout_s=config.actor_rollout_ref.rollout.startup_timeout_s)
        return roles

    def peak_memory(self) -> dict[str, float]:
        """Peak memory in GiB of the largest process of each role, resident and on GPU."""
        peaks: dict[str, float] = {}
        for group in self.groups:
            for parts in group.call_all("memory", "peak_memory_gib"):
                for kind, gib in parts.items():
                    name = f"perf/max_memory_{kind}_gb/{group.role}"
                    peaks[name] = max(peaks.get(name, 0.0), gib)
        return peaks

    def shutdown(self) -> None:
        """Stop the engines politely, then end every process."""
        from grpo_dist.errors import GrpoDistError

        try:
            self.rollout.gather(self.rollout.submit_all("shutdown", "shutdown"), timeout_s=10)
        except GrpoDistError:
            pass  # it is dead or hangs: the kill below is for that
        for group in self.groups:
            group.kill()


def build_trainer(config: RunConfig, roles: Roles, prompts: Prompts, steps: int) -> GRPOTrainer:
    """A trainer on started workers, without trackers or a display yet."""
    rollout = config.actor_rollout_ref.rollout
    most = config.data.max_response_length
    seed = 0 if rollout.resolved_deterministic(config.device) else None
    sampling = SamplingSettings(rollout.n, rollout.temperature, rollout.top_p, rollout.top_k, most, seed)
    val = rollout.val_kwargs
    temperature = val.temperature if val.do_sample else 0.0
    val_seed = config.trainer.seed if val.do_sample else None
    val_sampling = SamplingSettings(val.n, temperature, val.top_p, val.top_k, most, val_seed)
    silent = Progress(steps, 0, None)
    return GRPOTrainer(
        config, roles, prompts, sampling, val_sampling, Trackers({}, resumed_step=None), silent, total_steps=steps
    )


def policy_settings(config: RunConfig, place: Placement, num_steps: int) -> PolicySettings:
    """What the actor's ranks are built from."""
    actor, data = config.actor_rollout_ref.actor, config.data
    optim = actor.optim
    steps = num_steps * actor.ppo_epochs * (data.train_batch_size // actor.ppo_mini_batch_size)
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else math.floor(optim.lr_warmup_steps_ratio * steps)
    return PolicySettings(
        model=_model_settings(config, actor.fsdp_config.model_dtype, actor.fsdp_config.resolved_dtype(config.device)),
        device=place.device,
        num_threads=place.num_threads_per_worker,
        temperature=config.actor_rollout_ref.rollout.temperature,
        log_prob_micro_batch_size=config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
        seed=config.trainer.seed,
        optimizer=OptimizerSettings(
            optim.lr, optim.weight_decay, optim.betas, optim.lr_scheduler_type, warmup, steps, optim.min_lr_ratio
        ),
        objective=ObjectiveSettings(
            loss_mode=actor.policy_loss.loss_mode,
            loss_agg_mode=actor.loss_agg_mode,
            clip_ratio=actor.clip_ratio,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            use_kl_loss=actor.use_kl_loss,
            kl_loss_type=absolute(actor.kl_loss_type),
            kl_loss_coef=actor.kl_loss_coef,
            entropy_coeff=actor.entropy_coeff,
        ),
        train_micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
        grad_clip=actor.grad_clip,
    )


def reference_settings(config: RunConfig, place: Placement) -> PolicySettings:
    """What the reference's ranks are built from: the same model, frozen, held in its compute type."""
    ref = config.actor_rollout_ref.ref
    dtype = ref.fsdp_config.resolved_dtype(config.device)
    return PolicySettings(
        model=_model_settings(config, dtype, dtype),
        device=place.device,
        num_threads=place.num_threads_per_worker,
        temperature=config.actor_rollout_ref.rollout.temperature,
        log_prob_micro_batch_size=ref.log_prob_micro_batch_size_per_gpu,
        seed=config.trainer.seed,
    )


def reward_settings(config: RunConfig) -> RewardSettings:
    """What a reward process is built from."""
    model, custom = config.actor_rollout_ref.model, config.custom_reward_function
    path = str(Path(custom.path).absolute()) if custom.path and custom.path.endswith(".py") else custom.path
    return RewardSettings(model.path, model.trust_remote_code, path, custom.name, custom.reward_kwargs)


def _model_settings(config: RunConfig, model_dtype: str, compute_dtype: str) -> ModelSettings:
    model = config.actor_rollout_ref.model
    return ModelSettings(
        path=model.path,
        trust_remote_code=model.trust_remote_code,
        model_dtype=model_dtype,
        compute_dtype=compute_dtype,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        reshard_after_forward=config.actor_rollout_ref.actor.fsdp_config.reshard_after_forward,
    )


def _engine_settings(config: RunConfig, place: Placement, index: int) -> EngineSettings:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    return EngineSettings(
        model_path=model.path,
        device=place.device,
        dtype=rollout.resolved_dtype(config.device),
        trust_remote_code=model.trust_remote_code,
        tensor_parallel_size=place.tensor_parallel,
        max_model_len=rollout.resolved_max_model_len(config.data),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_memory_gib=rollout.kv_cache_memory_gib,
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        seed=config.trainer.seed + index,  # with equal seeds, engines would sample the same
    )


def _resources(config: RunConfig, place: Placement) -> Mapping[str, tuple[int, float, float]]:
    """Processes of each role, with the CPUs and GPUs of each."""
    cpus, gpus = place.num_cpus_per_worker, place.gpus_per_worker
    roles = {
        "actor": (place.actor_world_size, cpus, gpus),
        "rollout": (place.num_engines, cpus, gpus * place.tensor_parallel),
        "ref": (place.ref_world_size, cpus, gpus),
        "reward": (config.reward.num_workers, cpus, 0.0),
    }
    return {role: needs for role, needs in roles.items() if needs[0]}


def _environment(place: Placement) -> dict[str, str]:
    """What must be set before a worker starts. Ray itself sets OMP_NUM_THREADS=1 for workers of up to one CPU, and
    workers without variables of their own can use the processes that Ray has started beforehand.
    """
    threads = place.num_threads_per_worker
    return {"OMP_NUM_THREADS": str(threads)} if place.device == "cpu" and threads > 1 else {}
