"""The composition root: a config becomes started workers and a trainer.

All names in the config are resolved, and all prompts read, before a worker does any work. The roles start together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_dist.agents import load_agent_loop
from grpo_dist.algorithms.advantage import ADVANTAGE
from grpo_dist.algorithms.correction import KEY, read_bounds, read_rejections
from grpo_dist.algorithms.kl import KL
from grpo_dist.algorithms.policy_loss import POLICY_LOSS
from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.curriculum import CustomSampler, load_sampler_class
from grpo_dist.data.prompts import add_system_prompt, load_prompts
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.data.tokenize import TokenizedPrompt, check_token_ids, load_tokenizer, tokenize_prompts
from grpo_dist.rewards import check_data_sources, load_reward_function
from grpo_dist.tracking.base import Trackers
from grpo_dist.tracking.console import Progress
from grpo_dist.trainer.preflight import check_model, import_reward_function, model_setting
from grpo_dist.trainer.roles import Prompts, Roles
from grpo_dist.trainer.settings import (
    engine_settings,
    objective_settings,
    policy_settings,
    reference_settings,
    reward_settings,
    sampling_settings,
    target_settings,
    time_limits,
)
from grpo_dist.trainer.trainer import GRPOTrainer
from grpo_dist.workers.group import DATA_STAYS_IN_STORE, WorkerGroup
from grpo_dist.workers.groups import ActorGroup, ReferenceGroup
from grpo_dist.workers.policy import ActorWorker, PolicyWorker
from grpo_dist.workers.resources import release, reserve
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout import RolloutWorker
from grpo_dist.workers.rollout_group import RolloutGroup

# Ray's limit on concurrent calls of one rollout worker; the engine itself queues what it cannot run yet.
MAX_PROMPTS_IN_FLIGHT = 10_000
# Overlong prompts that are named; the others are counted.
MOST_ROWS_NAMED = 5
# How long a run that is done waits to hear how much memory its workers took.
MEMORY_TIMEOUT_S = 30.0


def resolve_names(config: RunConfig) -> None:
    """Import every function and class the config names.

    Raises:
        ConfigError: one of them does not exist.
        RewardError: importing the reward function hangs, or ends its process.
    """
    actor, reward = config.actor_rollout_ref.actor, config.custom_reward_function
    ADVANTAGE.get(config.algorithm.adv_estimator)
    KL.get(config.algorithm.kl_penalty)
    read_correction(config)
    KL.get(actor.kl_loss_type.removesuffix("+"))
    POLICY_LOSS.get(actor.policy_loss.loss_mode)
    agent = config.actor_rollout_ref.rollout.agent
    load_agent_loop(agent.default_agent_loop, agent.agent_kwargs)
    if reward.path is None:
        load_reward_function(None, reward.name, reward.reward_kwargs)
    else:
        import_reward_function(reward.path, config)
    sampler = config.data.sampler
    if sampler.class_path is not None and sampler.class_name is not None:
        load_sampler_class(sampler.class_path, sampler.class_name)


def read_correction(config: RunConfig) -> None:
    """Check the bounds of `algorithm.rollout_correction`.

    Raises:
        ConfigError: they cannot be read.
    """
    correction = config.algorithm.rollout_correction
    read_bounds(correction.rollout_is_threshold, key=f"{KEY}.rollout_is_threshold")
    read_rejections(correction.rollout_rs, correction.rollout_rs_threshold)


def load_run_prompts(config: RunConfig) -> tuple[Prompts, list[str]]:
    """Read and tokenize the prompts; also what the user should know about them.

    Raises:
        DataError: a file, a row, the model folder or its tokenizer is unusable.
        ConfigError: a data source has no scorer, or the sampler class is not there.
    """
    data, model = config.data, check_model(config)
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
    train, notes = _load(config, "data.train_files", data.train_files, data.train_max_samples, tokenizer)
    validation: list[TokenizedPrompt] = []
    if data.val_files:
        validation, more = _load(config, "data.val_files", data.val_files, data.val_max_samples, tokenizer)
        notes += more
    if model.vocab_size is not None:
        check_token_ids([*train, *validation], model.vocab_size, setting=model_setting(config))
    return Prompts(train, validation, _sampler(config, train)), notes


def _load(
    config: RunConfig, key: str, files: Sequence[str], most: int, tokenizer: Any
) -> tuple[list[TokenizedPrompt], list[str]]:
    """The prompts of one key, tokenized, and notes on them."""
    data = config.data
    prompts = load_prompts(
        files,
        key=key,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        max_samples=most,
        shuffle_seed=config.data_seed if data.shuffle and key == "data.train_files" else None,
    )
    if config.custom_reward_function.path is None:
        check_data_sources(prompt.data_source for prompt in prompts)
    notes = []
    if data.system_prompt is not None:
        prompts, num_kept = add_system_prompt(prompts, data.system_prompt)
        if num_kept:
            why = "have a system message of their own and keep it (data.system_prompt)"
            notes.append(f"{key}: {num_kept} of {len(prompts)} prompts {why}")
    tokenized, overlong = tokenize_prompts(
        prompts,
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    if overlong:
        what = "were left out" if data.filter_overlong_prompts else f"were cut (data.truncation={data.truncation})"
        named = "; ".join(prompt.location for prompt in overlong[:MOST_ROWS_NAMED])
        more = f"; and {len(overlong) - MOST_ROWS_NAMED} more" if len(overlong) > MOST_ROWS_NAMED else ""
        notes.append(
            f"{key}: {len(overlong)} of {len(prompts)} prompts are longer than data.max_prompt_length="
            f"{data.max_prompt_length} tokens and {what}: {named}{more}"
        )
    return tokenized, notes


def _sampler(config: RunConfig, train: Sequence[TokenizedPrompt]) -> PromptSampler | CustomSampler:
    """The order of the training prompts: shuffled, as in the files, or the user's."""
    data = config.data
    batch_size = data.gen_batch_size or data.train_batch_size
    if data.sampler.class_path is None or data.sampler.class_name is None:
        return PromptSampler(len(train), batch_size, shuffle=data.shuffle, seed=config.data_seed)
    prompts = [tokenized.prompt for tokenized in train]
    names = data.sampler.class_path, data.sampler.class_name
    return CustomSampler(*names, prompts, batch_size, seed=config.data_seed)


def total_steps(config: RunConfig, prompts: Prompts) -> int:
    """Training steps: trainer.total_training_steps, else total_epochs over the prompts (at least one step)."""
    wanted = config.data.train_batch_size
    sampled = config.data.gen_batch_size or wanted
    per_epoch = prompts.sampler.steps_per_epoch * sampled // max(sampled, wanted)
    return config.trainer.total_training_steps or max(1, config.trainer.total_epochs * per_epoch)


class Workers:
    """All worker processes of a run, from reservation to shutdown."""

    def __init__(self, config: RunConfig) -> None:
        """Start the processes; they import what they need while the driver reads the prompts."""
        self.config, self.place = config, placement(config)
        self._placement_group, bundles = reserve(_resources(config, self.place))
        limits = time_limits(config)

        def spawn(role: str, worker_class: type, env: Mapping[str, str] = {}, **options: Any) -> WorkerGroup:
            size = len(bundles[role])
            args = [(rank, size) if issubclass(worker_class, PolicyWorker) else () for rank in range(size)]
            options |= {"limits": limits, "env": DATA_STAYS_IN_STORE | dict(env)}
            return WorkerGroup.spawn(role, worker_class, bundles[role], args=args, **options)

        threads = _thread_environment(self.place)
        self.rollout = spawn("rollout", RolloutWorker, threads, max_concurrency=MAX_PROMPTS_IN_FLIGHT)
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
        restarts = RestartBudget(config.trainer.max_worker_restarts)
        ref = ReferenceGroup(self.ref, restarts) if self.ref is not None else None
        rollout = RolloutGroup(self.rollout, restarts)
        roles = Roles(ActorGroup(self.actor), rollout, RewardPool(self.reward, restarts), ref, restarts)
        engines = [engine_settings(config, place, i) for i in range(place.num_engines)]
        calls = roles.rollout.submit_start(engines)
        calls += roles.actor.submit_start(policy_settings(config, place, num_steps))
        calls += ref.submit_start(reference_settings(config, place)) if ref is not None else []
        calls += roles.reward.submit_start(reward_settings(config))
        self.actor.gather(calls)
        return roles

    def peak_memory(self) -> dict[str, float]:
        """Peak memory in GiB of the largest process of each role, resident and on GPU."""
        peaks: dict[str, float] = {}
        for group in self.groups:
            calls = group.submit_all("memory", "peak_memory_gib")
            for parts in group.gather(calls, timeout_s=MEMORY_TIMEOUT_S):
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
        release(self._placement_group)


def build_trainer(config: RunConfig, roles: Roles, prompts: Prompts, steps: int) -> GRPOTrainer:
    """A trainer on started workers, without trackers or a display yet."""
    sampling, val_sampling = sampling_settings(config)
    silent = Progress(steps, 0, None)
    objective = objective_settings(config)
    targets = target_settings(config)
    return GRPOTrainer(
        config,
        roles,
        prompts,
        sampling,
        val_sampling,
        objective,
        targets,
        Trackers({}, resumed_step=None),
        silent,
        total_steps=steps,
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


def _thread_environment(place: Placement) -> dict[str, str]:
    """What must be set before an engine's process starts. vLLM's kernels ask OpenMP, and Ray itself sets
    OMP_NUM_THREADS=1 for workers of up to one CPU.
    """
    threads = place.num_threads["rollout"]
    return {"OMP_NUM_THREADS": str(threads)} if place.device == "cpu" and threads > 1 else {}
