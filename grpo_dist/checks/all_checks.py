"""All checks of a job that are possible before Ray starts; `trainer.dry_run=true` ends after them.

All of them run, so that one attempt reports everything that is wrong. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_dist.assets import is_on_the_hub
from grpo_dist.assets.model_folder import ModelFolder
from grpo_dist.checks.machine import Machine, check_machine
from grpo_dist.checks.models import (
    REWARD_MODEL,
    CheckedModel,
    check_conversations,
    check_files,
    check_teachers,
    check_tokens,
    check_use,
    checked_models,
)
from grpo_dist.checks.own_code import check_code, try_sampler
from grpo_dist.checks.result import Checks, Ready
from grpo_dist.checks.run_folder import check_disk, check_resume
from grpo_dist.config.problems import Problem, config_error, value_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.engines.vllm.installed import attention_problem
from grpo_dist.plan.commands import command_of
from grpo_dist.plan.memory import memory_estimate, memory_problems
from grpo_dist.plan.model_rules import model_problems, position_problems
from grpo_dist.plan.placement import slots
from grpo_dist.plan.role_models import POLICY
from grpo_dist.plan.roles import Role, optimizer_key, roles_of
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.tracking.base import check_trackers
from grpo_dist.tracking.metric_names import SUPERVISED_VALIDATION, require_metrics
from grpo_dist.trainer.record import check_run_dir


def check_all(config: JobConfig, tell: Callable[[str], None], *, dry_run: bool) -> Ready[Any]:
    """Check everything that a run needs, including all files that it reads.

    Args:
        tell: called with a line for each check that passed.
        dry_run: whether this is a dry run: weights are not downloaded from the hub, and the checkpoint to resume from
            is fully verified, which a run does later, when it loads it.

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    checks, machine, ready = Checks(), Machine("", None), None
    with checks:
        machine = check_machine(config, slots(config))
        tell(machine.description)
    with checks:
        check_trackers(config.trainer.logger, config.trainer.project_name)
        check_run_dir(config.trainer.record_dir.absolute())
        tell(f"run directory: {config.trainer.record_dir}")
    rows = {row.model.title: row for row in checked_models(config)}
    folders: dict[str, ModelFolder] = {}
    for role, row in rows.items():
        with checks:
            weights = not (dry_run and is_on_the_hub(row.settings.path))
            folder = folders[role] = check_files(row, weights=weights)
            if problems := list(problems_of_model(config, row, folder, machine)):
                raise config_error(problems)
            tell(f"{role}: {row.settings.path}: {check_use(row, folder)}")
    for role_row in roles_of(config):
        with checks:
            _check_optimizer(config, role_row)
    needs = check_code(config, checks, tell) if isinstance(config, RunConfig) else None
    with checks:
        load = load_attribute(command_of(config).load, key="a row of plan/commands.py")
        if (loaded := load(config, folders.get(POLICY), needs)) is not None:
            ready = Ready(*loaded)
            for line in (ready.data.counts, *ready.notes, f"training steps: {ready.steps}"):
                tell(line)
    if isinstance(config, RunConfig) and POLICY in folders:
        _check_together(config, rows, folders, ready, checks)
    if isinstance(config, SupervisedConfig) and ready is not None:
        with checks:
            metrics = [SUPERVISED_VALIDATION + name for name in ready.data.kind.metrics]
            require_metrics(config.trainer, metrics)
    with checks:
        checkpoint = "" if ready is None else check_resume(config, ready.data.identity, ready.steps, verify=dry_run)
        if checkpoint:
            tell(checkpoint)
    with checks:
        if ready is not None and (model := folders.get(POLICY)) is not None:
            memory = memory_estimate(config, model.config, model.num_parameters) or []
            if room := check_disk(config, memory, ready.steps):
                tell(room)
            sizes = machine.gpu_gib, machine.host_gib, model.num_parameters
            for problem in memory_problems(config, model.config, *sizes, certain=False):
                ready.notes.append(problem.text)
                tell(problem.text)
    checks.end()
    assert ready is not None
    return ready


def _check_optimizer(config: JobConfig, row: Role) -> None:
    """Check the settings that go to the optimizer of a role by name."""
    key, model = optimizer_key(config, row), row.model(config)
    if key and model is not None and value_of(config, key).override_optimizer_config:
        # slow imports, which other runs do without
        from grpo_dist.engines.train.model_loading import DTYPES
        from grpo_dist.engines.train.optimizer import check_overrides

        check_overrides(value_of(config, key), DTYPES[model.held], f"{key}.override_optimizer_config")


def problems_of_model(config: JobConfig, row: CheckedModel, model: ModelFolder, machine: Machine) -> Iterator[Problem]:
    """Yield what a model's config.json and the machine's memory rule out."""
    if row.model.title != POLICY:
        yield from position_problems(config, row.model, model.config)
        return
    yield from model_problems(config, model.config, machine.gpu_gib, machine.host_gib, model.num_parameters)
    changed, engines_on_cpu = {**model.config, **row.settings.model.override_config}, config.device == "cpu"
    if isinstance(config, RunConfig) and engines_on_cpu and (why := attention_problem(changed)):
        text = f"{row.model.setting}: {why}; use another model, or GPUs (trainer.n_gpus_per_node)"
        yield Problem(text, (row.settings.key, "trainer.n_gpus_per_node"))


def _check_together(
    config: RunConfig,
    rows: Mapping[str, CheckedModel],
    folders: Mapping[str, ModelFolder],
    ready: Ready[Any] | None,
    checks: Checks,
) -> None:
    policy = folders[POLICY]
    with checks:
        if ready is not None and config.data.sampler.code is not None:
            try_sampler(config, ready.data.sampler)
    with checks:
        check_teachers(config, ready.data.train if ready is not None else ())
    for role, row in rows.items():
        with checks:
            if row.model.reads_tokens and role in folders:
                check_tokens(config, row, folders[role], policy)
    with checks:
        if ready is not None and REWARD_MODEL in folders:
            prompts = [*ready.data.train, *ready.data.validation]
            check_conversations(config, policy, folders[REWARD_MODEL], prompts)
