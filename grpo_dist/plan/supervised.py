"""The rules and notes of the commands that train one model on rows with known answers."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.problems import Problem, between_keys, problem_between
from grpo_dist.config.schema_supervised import SupervisedConfig
from grpo_dist.plan.key_rules import job_rules
from grpo_dist.plan.memory_rules import memory_problems
from grpo_dist.plan.model_rules import position_problems
from grpo_dist.plan.model_shape import model_config_at_hand
from grpo_dist.plan.roles import models_of
from grpo_dist.plan.rules import files_exist, model_folders_exist


def every_rank_has_a_gpu(config: SupervisedConfig) -> Iterator[Problem]:
    """A rank has a GPU of its own, and copies of the weights lie on equally many ranks."""
    asked, size = config.cluster.world_size, config.engine.fsdp_size
    if config.num_gpus and asked is not None and asked > config.num_gpus:
        why = f"every rank has a GPU of its own, and there are {config.num_gpus}; lower it, or leave it null"
        yield problem_between(config, why, "cluster.world_size", "trainer.nnodes", "trainer.n_gpus_per_node")
    if size > 0 and config.world_size % size:
        why = f"{config.world_size} ranks do not split into copies of {size}; set a divisor, or -1"
        yield problem_between(config, why, "engine.fsdp_size", "cluster.world_size")


def passes_hold_the_longest_row(config: SupervisedConfig) -> Iterator[Problem]:
    """The token budget holds at least the longest conversation."""
    budget = config.data.max_token_len
    if budget is not None and budget < config.data.max_length:
        why = "a pass must hold the longest conversation; raise the first or lower the second"
        yield problem_between(config, why, "data.max_token_len_per_gpu", "data.max_length")


def the_model_takes_it(config: SupervisedConfig) -> Iterator[Problem]:
    """Check what the model's config.json rules out, where that is at hand."""
    found = {**(model_config_at_hand(config.model.path) or {}), **config.model.override_config}
    yield from position_problems(config, models_of(config)[0], found)
    gib = config.cluster.gpu_memory_gib if config.num_gpus else None
    yield from memory_problems(config, found, gib, None)


RULES = (
    job_rules,
    files_exist,
    model_folders_exist,
    every_rank_has_a_gpu,
    passes_hold_the_longest_row,
    the_model_takes_it,
)


@between_keys
def notes(config: SupervisedConfig) -> Iterator[str]:
    """Yield what the user may not expect of a valid config."""
    trainer, idle = config.trainer, config.num_gpus - config.world_size
    if config.data.val_files and trainer.test_freq < 0 and not trainer.val_only:
        before = "only before the first step" if trainer.val_before_train else "never"
        yield f"<trainer.test_freq>: data.val_files are used {before}"
    if idle > 0:
        yield f"cluster.world_size={config.world_size}: {idle} of {config.num_gpus} GPUs are idle"
