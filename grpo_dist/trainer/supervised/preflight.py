"""All checks of a command that trains one model that are possible before Ray starts. Imports neither Ray nor vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grpo_dist.assets import TRAINED_MODEL_KEY, resolve_model_path
from grpo_dist.assets.model_folder import ModelFolder, check_model_folder
from grpo_dist.config.problems import config_error
from grpo_dist.config.schema_supervised import SFTConfig, SupervisedConfig
from grpo_dist.config.supervised import is_valid
from grpo_dist.config.supervised_layout import slots
from grpo_dist.config.supervised_memory import memory_estimate, memory_problems
from grpo_dist.tracking.metric_names import SUPERVISED_VALIDATION, require_metric
from grpo_dist.trainer.checks import (
    Checks,
    Ready,
    check_adapter,
    check_place,
    check_resume,
    describe_model,
    is_on_the_hub,
)
from grpo_dist.trainer.disk_check import check_disk
from grpo_dist.trainer.machine import Machine
from grpo_dist.trainer.supervised.rows import Rows, total_steps
from grpo_dist.trainer.supervised.tasks import TASKS, load_rows, read_rows


@dataclass(frozen=True)
class ReadyRows(Ready):
    """The result of the checks, with the rows."""

    rows: Rows


def preflight(config: SupervisedConfig, tell: Callable[[str], None], *, rehearsal: bool) -> ReadyRows:
    """Check everything that a run needs, including all files that it reads.

    Args:
        config: the run's config.
        tell: called with a line for each check that passed.
        rehearsal: whether this is a dry run: weights are not downloaded from the hub, and the checkpoint to resume from
            is fully verified, which a run does later, when it loads it.

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    checks, task = Checks(), TASKS[config.role]
    model, ready = None, None
    machine = check_place(config, slots(config), checks, tell)
    with checks:
        model = check_model(config, machine, weights=not (rehearsal and is_on_the_hub(config.model.path)))
        remark = task.check_model(model, f"{TRAINED_MODEL_KEY}={config.model.path}")
        adapter = check_adapter("model", config.model.lora_adapter_path, model) if isinstance(config, SFTConfig) else ""
        tell("; ".join(filter(None, (f"model: {config.model.path}: {describe_model(model)}", remark, adapter))))
    with checks:
        if model is None:
            read_rows(config)  # what is wrong with them, too
        else:
            rows, notes = load_rows(config, model)
            ready = ReadyRows(notes, total_steps(config, rows), rows)
            tell(f"rows: {len(rows.train)} {rows.kind} for training, {len(rows.validation)} for validation")
            for note in notes:
                tell(note)
            tell(f"training steps: {ready.steps}")
    with checks:
        if ready is not None:
            require_metric(config.trainer.keep_best_metric, [SUPERVISED_VALIDATION + m for m in ready.rows.metrics])
    with checks:
        found = "" if ready is None else check_resume(config, ready.rows.identity, ready.steps, verify=rehearsal)
        if found:
            tell(found)
    with checks:
        if model is not None and ready is not None:
            role = memory_estimate(config, model.config, model.num_parameters if isinstance(config, SFTConfig) else 0)
            check_disk(config, None if role is None else [role], ready, tell)
    checks.end()
    assert ready is not None
    return ready


def check_model(config: SupervisedConfig, machine: Machine, *, weights: bool) -> ModelFolder:
    """Find the model folder, download it if it is a hub model, and check its files and its memory.

    Args:
        config: the run's config.
        machine: the machine or cluster of the run.
        weights: whether to download the weights and check their headers.

    Raises:
        ConfigError: there is no such model, or the ranks do not fit in memory.
        DataError: a file is missing, damaged or inconsistent with the others.
    """
    setting = f"{TRAINED_MODEL_KEY}={config.model.path}"
    # a reward model is always of a class of transformers' own, whatever code comes with it
    trust = config.model.trust_remote_code or not isinstance(config, SFTConfig)
    folder = resolve_model_path(config.model.path, weights=weights, key=TRAINED_MODEL_KEY)
    found = check_model_folder(folder, setting=setting, trust_remote_code=trust, weights=weights)
    problems = memory_problems(
        config,
        found.config,
        machine.gpu_gib,
        machine.host_gib,
        valid=is_valid,
        # a reward model has fewer than a causal LM, whose output layer it leaves out
        num_parameters=found.num_parameters if isinstance(config, SFTConfig) else 0,
    )
    if listed := list(problems):
        raise config_error(listed)
    return found
