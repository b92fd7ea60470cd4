"""All checks that are possible before Ray starts, for a run and for `trainer.dry_run=true`.

All checks run, so that one attempt reports everything that is wrong. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grpo_dist.assets import POLICY_SECTION, resolve_model_path
from grpo_dist.assets.model_folder import ModelFolder, check_model_folder
from grpo_dist.config.memory import memory_estimate
from grpo_dist.config.model_rules import model_problems
from grpo_dist.config.node_layout import slots
from grpo_dist.config.problems import config_error
from grpo_dist.config.schema import RunConfig
from grpo_dist.engines.vllm.cpu_attention import attention_problem
from grpo_dist.errors import ConfigError
from grpo_dist.rewards.base import RowNeeds
from grpo_dist.trainer.checks import (
    Checks,
    Ready,
    check_adapter,
    check_place,
    check_resume,
    describe_model,
    is_on_the_hub,
)
from grpo_dist.trainer.critic_check import check_critic
from grpo_dist.trainer.disk_check import check_disk
from grpo_dist.trainer.machine import Machine
from grpo_dist.trainer.named_code import import_reward, resolve_names
from grpo_dist.trainer.own_code import own_functions, try_sampler
from grpo_dist.trainer.reward_model_check import check_conversations, check_reward_model
from grpo_dist.trainer.run_prompts import Prompts, load_run_prompts, model_setting, read_prompts, total_steps
from grpo_dist.trainer.split_check import check_split_model, split_models
from grpo_dist.trainer.teacher_check import check_teacher


@dataclass(frozen=True)
class ReadyPrompts(Ready):
    """The result of the checks, with the prompts."""

    prompts: Prompts


def preflight(config: RunConfig, tell: Callable[[str], None], *, rehearsal: bool) -> ReadyPrompts:
    """Check everything that a run needs, including all files that it reads.

    Args:
        config: the run's config.
        tell: called with a line for each check that passed.
        rehearsal: whether this is a dry run: weights are not downloaded from the hub, and the checkpoint to resume from
            is fully verified, which a run does later, when it loads it.

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    checks = Checks()
    # Of a reward function that cannot be imported nobody knows what it needs.
    model, scorer, ready, needs = None, None, None, RowNeeds(ground_truth=False)
    machine = check_place(config, slots(config), checks, tell)
    _check_names(config, checks, tell)
    with checks:
        needs = import_reward(config)
        tell(f"reward: {_reward_names(config) if needs.asked else 'given by the agent loop'}")
    with checks:
        model = check_model(config, weights=not (rehearsal and is_on_the_hub(config.actor_rollout_ref.model.path)))
        _check_fit(config, model, machine)
        adapter = check_adapter(POLICY_SECTION, config.actor_rollout_ref.model.lora_adapter_path, model)
        described = f"model: {config.actor_rollout_ref.model.path}: {describe_model(model)}"
        tell("; ".join(filter(None, (described, adapter))))
    if config.reward_model.enable:
        with checks:
            path = config.reward_model.model.path or ""
            scorer = check_reward_model(config, weights=not (rehearsal and is_on_the_hub(path)))
            tell(f"reward model: {path}: {describe_model(scorer)}")
    if config.needs_critic:
        with checks:
            path = config.critic.model.path
            if model is not None:
                critic = check_critic(config, model, weights=not (rehearsal and is_on_the_hub(path)))
                head = "its head is trained on" if "score.weight" in critic.shapes else "it gets a new head"
                tell(f"critic: {path}: {describe_model(critic)}{f'; {head}' if critic.shapes else ''}")
    _check_reference(config, model, checks, tell, rehearsal=rehearsal)
    for each in split_models(config):
        with checks:
            check_split_model(each)
            tell(f"{each.key}: sequences are split over {each.sequence_parallel_size} ranks")
    with checks:
        ready = _check_data(config, model, needs)
        if ready is not None:
            tell(f"prompts: {len(ready.prompts.train)} for training, {len(ready.prompts.validation)} for validation")
            for note in ready.notes:
                tell(note)
            tell(f"training steps: {ready.steps}")
    with checks:
        if model is not None and scorer is not None and ready is not None:
            check_conversations(config, model, scorer, [*ready.prompts.train, *ready.prompts.validation])
    with checks:
        found = "" if ready is None else check_resume(config, ready.prompts.identity, ready.steps, verify=rehearsal)
        if found:
            tell(found)
    with checks:
        if model is not None and ready is not None:
            check_disk(config, memory_estimate(config, model.config, model.num_parameters), ready, tell)
    checks.end()
    assert ready is not None
    return ready


def _check_names(config: RunConfig, checks: Checks, tell: Callable[[str], None]) -> None:
    """Import what the config names, and try its own estimators, losses and KL terms, each of which may be wrong."""
    with checks:
        resolve_names(config)
        tell("functions and classes named in the config: all found")
        for named, attempt in own_functions(config):
            with checks:
                attempt()
                tell(f"{named}: tried on made-up numbers")


def _reward_names(config: RunConfig) -> str:
    """The reward function as the config names it; all of a list."""
    named = config.custom_reward_function.listed
    paths = [config.reward_function] if named is None else [each.get("path") for each in named]
    return ", ".join(path or "built-in, by data_source" for path in paths)


def _check_reference(
    config: RunConfig, policy: ModelFolder | None, checks: Checks, tell: Callable[[str], None], *, rehearsal: bool
) -> None:
    """Check the teacher, if there is one and the policy was found."""
    path = config.actor_rollout_ref.ref.model.path
    if path is None or policy is None:
        return
    with checks:
        teacher = check_teacher(config, policy, weights=not (rehearsal and is_on_the_hub(path)))
        tell(f"teacher: {path}: {describe_model(teacher)}")


def check_model(config: RunConfig, *, weights: bool = True) -> ModelFolder:
    """Find the model folder, download it if it is a hub model, and check its files.

    Args:
        config: the run's config.
        weights: whether to download the weights and check their headers.

    Raises:
        ConfigError: there is no such model.
        DataError: a file is missing, damaged or inconsistent with the others.
    """
    model = config.actor_rollout_ref.model
    folder = resolve_model_path(model.path, weights=weights)
    trust = model.trust_remote_code
    return check_model_folder(folder, setting=model_setting(config), trust_remote_code=trust, weights=weights)


def _check_fit(config: RunConfig, model: ModelFolder, machine: Machine) -> None:
    """Check lengths, tensor parallelism and memory against the model's config.json."""
    gpu, host, parameters = machine.gpu_gib, machine.host_gib, model.num_parameters
    if problems := list(model_problems(config, model.config, gpu, host, parameters)):
        raise config_error(problems)
    changes = config.actor_rollout_ref.model.override_config
    if config.device == "cpu" and (problem := attention_problem({**model.config, **changes})):
        raise ConfigError(f"{model_setting(config)}: {problem}; use another model, or GPUs (trainer.n_gpus_per_node)")


def _check_data(config: RunConfig, model: ModelFolder | None, needs: RowNeeds) -> ReadyPrompts | None:
    """Check all rows; without a model only what needs no tokenizer, and return None."""
    data = config.data
    if model is None:
        read_prompts(config, "data.train_files", data.train_files, data.train_max_samples, needs)
        if data.val_files:
            read_prompts(config, "data.val_files", data.val_files, data.val_max_samples, needs)
        return None
    prompts, notes = load_run_prompts(config, model, needs)
    if config.data.sampler.code is not None:
        try_sampler(config, prompts.sampler)
    steps = total_steps(config, prompts)
    if late := [step for step in config.trainer.profile_steps or () if step > steps]:
        notes.append(f"trainer.profile_steps: the run has {steps} steps, so no profile of {late}; name earlier ones")
    return ReadyPrompts(notes, steps, prompts)
