"""Compares the config and data of a checkpoint with those of the run that resumes from it.

A changed key without effect on results is ignored. One that makes the saved weights, optimizer states or positions
meaningless is refused. All others are allowed and shown.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpo_dist.config.schema import RunConfig
from grpo_dist.engines.train.durable_files import digest_file
from grpo_dist.errors import CheckpointError
from grpo_dist.redact import redact
from grpo_dist.trainer.checkpoint.folder import CONFIG, RunState

if TYPE_CHECKING:
    from grpo_dist.data.tokenize import TokenizedPrompt

_ACTOR, _ROLLOUT, _REF, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))

# Machines, logging, frequencies, limits of time and memory, and micro-batches: results do not depend on them.
HARMLESS = (
    "cluster.*",
    "ray_kwargs.*",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.logger*",
    "trainer.default_local_dir",
    "trainer.test_freq",
    "trainer.val_*",
    "trainer.save_*",
    "trainer.keep_best_metric",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.resume_*",
    "trainer.max_*_restarts",
    "trainer.health.*",
    "trainer.export_*",
    "trainer.log_*",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.worker_timeout_s",
    "trainer.stage_timeout_s.*",
    "actor_rollout_ref.nccl_timeout",
    "trainer.dry_run",
    "data.train_files*",  # their content is compared instead, by the prompts' fingerprint
    "data.val_*",
    "reward.num_workers",
    "reward.timeout_s",
    "reward.max_failure_rate",
    f"{_MODEL}.trust_remote_code",
    f"{_MODEL}.use_remove_padding",
    f"{_MODEL}.enable_gradient_checkpointing",
    f"{_ACTOR}.checkpoint.*",
    f"{_ACTOR}.*micro_batch_size_per_gpu",
    f"{_ACTOR}.use_dynamic_bsz",
    f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ACTOR}.use_prefix_grouper",
    f"{_ACTOR}.fsdp_config.*offload",
    f"{_ACTOR}.fsdp_config.reshard_after_forward",
    f"{_ACTOR}.fsdp_config.fsdp_size",
    f"{_ACTOR}.fsdp_config.defer_grad_sync",
    f"{_REF}.*micro_batch_size_per_gpu",
    f"{_REF}.log_prob_*",
    f"{_REF}.fsdp_config.*offload",
    "reward_model.micro_batch_size_per_gpu",
    "reward_model.use_dynamic_bsz",
    "reward_model.forward_max_token_len_per_gpu",
    "reward_model.model.trust_remote_code",
    "reward_model.model.fsdp_config.*offload",
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
)
# The length of the run matters only if the learning rate schedule depends on it.
LENGTH = ("trainer.total_training_steps", "trainer.total_epochs")
# Pattern -> why the checkpoint cannot be used with another value.
REFUSED = {
    f"{_MODEL}.path": "the saved weights are those of another model",
    f"{_MODEL}.override_config*": "the saved weights are those of another model",
    f"{_MODEL}.lora_*": "the saved factors have another shape or scale",
    f"{_MODEL}.target_modules*": "the saved factors belong to other modules",
    f"{_MODEL}.exclude_modules*": "the saved factors belong to other modules",
    f"{_ACTOR}.fsdp_config.model_dtype": "weights and optimizer states were saved in another dtype",
    "trainer.seed": "the samples and the order of the prompts depend on the seed",
    "data.seed": "the order of the prompts depends on it",
    "data.shuffle": "the saved position is one in another order of the prompts",
    "data.sampler.*": "the saved position is one in another order of the prompts",
}
MISSING = "(not set)"


@dataclass
class Changes:
    """Changed keys, as lines "key: old -> new": those that are refused, and those that are shown."""

    refused: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)


def saved_config(config: RunConfig) -> str:
    """The resolved config as YAML, without secrets; null dtypes are replaced by the dtypes that are used."""
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
    return yaml.safe_dump(redact(resolved), sort_keys=False, allow_unicode=True)


def check_changes(
    folder: Path, state: RunState, config: RunConfig, prompts: Mapping[str, Any], code: Mapping[str, str]
) -> list[str]:
    """Changes since a checkpoint, as lines "key: old -> new", without the keys that have no effect on results.

    Args:
        folder: the checkpoint.
        state: its state.
        config: the current config.
        prompts: `identify_prompts` of the current training prompts.
        code: `digest_code` of the current config.

    Raises:
        CheckpointError: a change makes the checkpoint unusable, or its config cannot be read.
    """
    old = read_config(folder)
    new = yaml.safe_load(saved_config(config))
    changes = compare_configs(old, new)
    changes.shown += _edited(dict(flatten(old)), dict(flatten(new)), state.code, code)
    if state.prompts and state.prompts != prompts:
        if state.prompts["count"] != prompts["count"]:
            what = f"{state.prompts['count']} -> {prompts['count']} training prompts"
        else:
            what = f"{prompts['count']} training prompts, but different ones or in another order"
        changes.refused.append(f"data.train_files: {what} (the saved positions would refer to other prompts)")
    if changes.refused:
        listed = "\n".join(f"  {line}" for line in changes.refused)
        raise CheckpointError(
            f"{folder} cannot be resumed with this config:\n{listed}\nRestore these keys, or start anew with "
            "trainer.resume_mode=disable or another trainer.default_local_dir"
        )
    return changes.shown


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read the resolved config of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, Mapping):
            raise TypeError("holds no keys")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from None
    return config


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Compare two resolved configs."""
    changes = Changes()
    before, after = _effective(old), _effective(new)
    harmless = HARMLESS if _rate_depends_on_length(after) or _rate_depends_on_length(before) else HARMLESS + LENGTH
    for key in dict.fromkeys([*before, *after]):
        values = before.get(key, MISSING), after.get(key, MISSING)
        if values[0] == values[1] or any(fnmatch.fnmatchcase(key, pattern) for pattern in harmless):
            continue
        line = f"{key}: {_shown(values[0])} -> {_shown(values[1])}"
        why = next((why for pattern, why in REFUSED.items() if fnmatch.fnmatchcase(key, pattern)), None)
        if why is not None:
            changes.refused.append(f"{line} ({why})")
        else:
            changes.shown.append(line)
    return changes


def digest_code(config: RunConfig) -> dict[str, str]:
    """Digests of the Python files that the config names (`file.py` or `file.py:attribute`), by config key."""
    found = {}
    for key, value in flatten(config.model_dump(mode="json")):
        file = Path(re.sub(r"\.py:\w+$", ".py", value)) if isinstance(value, str) else Path()
        if file.suffix == ".py" and file.is_file():
            found[key] = digest_file(file).blake2b
    return found


def _edited(
    before: Mapping[str, Any], after: Mapping[str, Any], old_code: Mapping[str, str], code: Mapping[str, str]
) -> list[str]:
    """Keys that name the same Python file as before, whose content has changed."""
    same = (key for key in code if before.get(key) == after.get(key))
    return [f"{key}: {after[key]} was edited" for key in same if key in old_code and code[key] != old_code[key]]


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config by dotted key, without keys that have no effect because of other keys."""
    flat = dict(flatten(config))
    if flat.get("data.seed") is None:
        flat["data.seed"] = flat.get("trainer.seed")
    if not flat.get(f"{_MODEL}.lora_rank"):
        for name in ("lora_alpha", "target_modules", "exclude_modules"):
            flat.pop(f"{_MODEL}.{name}", None)
    if not flat.get("reward_model.enable"):
        flat = {key: value for key, value in flat.items() if not key.startswith("reward_model.")}
    return flat


def flatten(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; a list is one value."""
    if isinstance(section, Mapping) and section:
        for name, value in section.items():
            yield from flatten(value, f"{prefix}.{name}" if prefix else str(name))
    elif section != {}:
        yield prefix, section


def identify_prompts(prompts: Sequence[TokenizedPrompt]) -> dict[str, Any]:
    """The number of training prompts, and a fingerprint of their content and order.

    System messages and the chat template are left out: they do not change the positions.
    """
    digest = hashlib.blake2b(digest_size=16)
    for prompt in (tokenized.prompt for tokenized in prompts):
        asked = [message for message in prompt.messages if message.get("role") != "system"]
        digest.update(json.dumps([prompt.data_source, asked, prompt.ground_truth], default=str).encode())
    return {"count": len(prompts), "fingerprint": digest.hexdigest()}


def _rate_depends_on_length(flat: Mapping[str, Any]) -> bool:
    optim = f"{_ACTOR}.optim"
    warms_up = flat.get(f"{optim}.lr_warmup_steps", -1) < 0 and flat.get(f"{optim}.lr_warmup_steps_ratio", 0) > 0
    return warms_up or flat.get(f"{optim}.lr_scheduler_type", "constant") != "constant"


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value, default=str)
