"""The plan of a command that trains one model as text, before anything starts."""

from __future__ import annotations

from grpo_dist.config.load import readable_config
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.plan_text import Rows, added, device_memory, indent, many, table
from grpo_dist.config.schema_supervised import SupervisedConfig
from grpo_dist.config.supervised_memory import memory_estimate


def format_plan(config: SupervisedConfig, notes: list[str]) -> str:
    """The output of a dry run: the whole config, then the plan."""
    blocks = [
        "resolved config\n" + indent(readable_config(config).rstrip().splitlines()),
        "run\n" + table(_run_rows(config)),
        "memory per rank (estimate)\n" + table(_memory_rows(config)),
    ]
    if notes:
        blocks.append("notes\n" + indent(notes))
    return "\n\n".join(blocks)


def format_summary(config: SupervisedConfig, notes: list[str]) -> str:
    """A short form of the plan, shown at the start of a run."""
    return "\n".join([table(_run_rows(config)), *(f"  note: {note}" for note in notes)])


def _run_rows(config: SupervisedConfig) -> Rows:
    trainer, data, engine = config.trainer, config.data, config.engine
    length = many(trainer.total_epochs, "epoch")
    if trainer.total_training_steps is not None:
        length = many(trainer.total_training_steps, "training step")
    if data.max_token_len:
        passes = f"at most {data.max_token_len:,} tokens"
    else:
        passes = f"{data.micro_batch_size_per_gpu:,} conversations of up to {data.max_length:,} tokens"
    where = "CPU" if config.device == "cpu" else many(config.world_size, "GPU")
    compute = engine.resolved_dtype(config.default_dtype)
    return [
        ("model", config.model.path),
        ("train data", ", ".join(data.train_files)),
        ("validation data", ", ".join(data.val_files) or "none"),
        ("length", f"{length} of {many(data.train_batch_size, 'row')}, lr {config.optim.lr:g}"),
        ("ranks", f"{many(config.world_size, 'rank')} on {where}, weights {engine.model_dtype}, compute {compute}"),
        ("passes", passes),
        ("run directory", f"{trainer.default_local_dir} (resume: {trainer.resume_mode})"),
        ("logs", ", ".join(trainer.records)),
    ]


def _memory_rows(config: SupervisedConfig) -> Rows:
    role = memory_estimate(config, model_config_at_hand(config.model.path))
    if role is None:
        return [("rank", "unknown: the model's config.json is not on this machine")]
    return [("rank", device_memory(role)), ("rank, CPU memory", added(role.host))]
