"""Compares the config and data of a checkpoint with those of the run that resumes from it.

A changed key without effect on results is ignored. One that makes the saved weights, optimizer states or positions
meaningless is refused. All others, but for a few that are shown, make it another experiment: that goes on from the
checkpoint only where the config says so. The fields of the schema are marked accordingly (`Resume`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from grpo_dist.config.environment import recorded
from grpo_dist.config.field_types import Resume
from grpo_dist.config.keys import as_text, flatten, resume_mark
from grpo_dist.config.load import as_yaml, with_later_keys
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.config.schema_roles import LORA_RANK
from grpo_dist.data.prompts import SOURCE_KEY
from grpo_dist.engines.train.durable_files import digest_file
from grpo_dist.errors import CheckpointError
from grpo_dist.plan.commands import command_of
from grpo_dist.plan.plan import resolve
from grpo_dist.plan.roles import ROLES
from grpo_dist.plugins.names import parse_code
from grpo_dist.plugins.registry import DIGEST
from grpo_dist.redact import lacks_secret, names_a_secret
from grpo_dist.trainer.checkpoint.folder import CONFIG, RunState

if TYPE_CHECKING:
    from grpo_dist.data.tokenize import TokenizedPrompt

MISSING = "(not set)"
_VALUE, _HIDDEN = "value ", "hidden "
_ROLES = "actor_rollout_ref"
_OPTIMS = *(f"{row.section}.optim" for row in ROLES.values() if row.trains), "optim"
_LORA = "lora_alpha", "target_modules", "exclude_modules", "lora.merge"
# A key that switches something on, also by keys below it -> beginnings of the keys that have no effect while it is off.
_IDLE = {
    f"{_ROLES}.model.{LORA_RANK}": tuple(f"{_ROLES}.model.{name}" for name in _LORA),
    f"model.{LORA_RANK}": tuple(f"model.{name}" for name in _LORA),
    "reward_model.enable": ("reward_model.",),
    f"{_ROLES}.ref.model.path": tuple(f"{_ROLES}.ref.model.{name}" for name in ("path", "trust", "override")),
    f"{_ROLES}.ref.model.endpoint.base_url": (f"{_ROLES}.ref.model.endpoint.",),
} | {row.switch: (f"{row.section}.", f"trainer.{row.name}_warmup") for row in ROLES.values() if row.switch}


@dataclass
class Changes:
    """Changed keys, as lines "key: old -> new": with `refused` ones the checkpoint cannot be used, `experiment` ones
    make it another experiment.
    """

    refused: list[str] = field(default_factory=list)
    experiment: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)


def saved_config(config: JobConfig) -> str:
    """Return the config as YAML, as it may be seen, with the types and seeds that are used where a null leaves them."""
    return as_yaml(recorded(config, resolve(config).model_dump(mode="json")))


def check_changes(
    folder: Path, state: RunState, config: JobConfig, prompts: Mapping[str, Any], code: Mapping[str, str]
) -> list[str]:
    """Changes since a checkpoint, as lines "key: old -> new", without the keys that have no effect on results.

    `prompts` is the number and fingerprint of the current training rows, `code` the `digest_code` of the config.

    Raises:
        CheckpointError: a change makes the checkpoint unusable, or it is of another experiment and the config does not
            say to go on; or its config cannot be read.
    """
    trainer = config.trainer
    others = [key for key, now in code.items() if now.startswith(_VALUE) and state.code.get(key, now) != now]
    changes = find_changes(folder, config, others)
    changes.shown += _edited(_flat(read_config(folder)), _flat(_plain(config)), state.code, code)
    if state.prompts and state.prompts != prompts:
        if state.prompts["count"] != prompts["count"]:
            what = f"{state.prompts['count']} -> {prompts['count']} training rows"
        else:
            what = f"{prompts['count']} training rows, but different ones or in another order"
        changes.refused.append(f"data.train_files: {what} (the saved positions would refer to other rows)")
    # validation alone trains nothing, and who names a checkpoint has chosen it
    allowed = trainer.val_only or trainer.resume_mode in ("force", "resume_path")
    if changes.refused or (changes.experiment and not allowed):
        raise CheckpointError(_refusal(folder, config, changes))
    return changes.experiment + changes.shown


def told(changes: Sequence[str]) -> list[str]:
    """One text that lists what `check_changes` has found, if it has found something."""
    return ["\n  ".join(["the config has changed since then:", *changes])] if changes else []


def find_changes(folder: Path, config: JobConfig, others: Sequence[str] = ()) -> Changes:
    """The changes of the config since one in a folder; `others` are keys that had another value of the environment.

    Raises:
        CheckpointError: that one cannot be read.
    """
    new = _flat(_plain(config))
    old = _flat(with_later_keys(read_config(folder), command_of(config)))
    old |= {key: "another value" for key in others}
    return compare_configs(old, new, type(config))


def _plain(config: JobConfig) -> Any:
    return yaml.safe_load(saved_config(config))


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key; a function that was given as an object has the same place after an edit."""
    return dict(flatten(json.loads(DIGEST.sub("", json.dumps(values, default=str)))))


def _refusal(folder: Path, config: JobConfig, changes: Changes) -> str:
    ways = [f"For a run of its own, set {another_place(config)}."]
    if changes.refused:
        ways.append("To go on from this checkpoint, undo the changes that have a reason in brackets.")
    if changes.experiment:
        what = "with the other changes" if changes.refused else "from this checkpoint with these changes"
        ways.append(f"To go on {what}, set trainer.resume_mode=force.")
    ways.append("To start anew in this folder, set trainer.resume_mode=disable.")
    listed = "\n".join(f"  {line}" for line in (*changes.experiment, *changes.refused))
    return f"{folder} belongs to another experiment. These have changed:\n{listed}\n{' '.join(ways)}"


def another_place(config: JobConfig) -> str:
    """Say what to set so that a run has a directory of its own."""
    trainer = config.trainer
    by_name = Path(trainer.default_local_dir).parts[-2:] == (trainer.project_name, trainer.experiment_name)
    return "trainer.experiment_name to another name" if by_name else "trainer.default_local_dir to another folder"


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read the resolved config of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, Mapping):
            raise TypeError("holds no keys")
    except (OSError, ValueError, RecursionError, yaml.YAMLError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from None
    return config


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any], schema: type[JobConfig]) -> Changes:
    """Compare two resolved configs of a command, by the marks of its schema."""
    changes = Changes()
    before, after = _effective(old), _effective(new)
    schedules = any(_rate_depends_on_length(config, optim) for config in (before, after) for optim in _OPTIMS)
    for key in dict.fromkeys([*before, *after]):
        values = before.get(key, MISSING), after.get(key, MISSING)
        mark = resume_mark(key, schema)
        if mark is not None and mark.switch and after.get(mark.switch, 0) <= 0:
            mark = None
        if values[0] == values[1] or mark == Resume.FREE or (mark == Resume.LENGTH and not schedules):
            continue
        line = f"{key}: {as_text(values[0])} -> {as_text(values[1])}"
        if mark is None:
            changes.experiment.append(line)
        elif mark.kind == "refused":
            changes.refused.append(f"{line} ({mark.why})")
        else:
            changes.shown.append(line)
    return changes


def digest_code(config: JobConfig, like: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Digests, by config key, of the functions that the config names (`file.py` or `file.py:attribute`), and of the
    values that come from the environment or are not saved: these are of two bytes, which tell nothing of the value.

    Args:
        like: other digests, whose salts are used again, so that those of equal values are equal.
    """
    values, digests = dict(flatten(config.model_dump(mode="json"))), {}
    for place in config.references:
        key = ".".join(map(str, itertools.takewhile(lambda name: isinstance(name, str), place)))
        if not names_a_secret(key):  # a new password makes no other experiment
            digests[key] = _VALUE + hashlib.blake2b(as_text(values[key]).encode(), digest_size=2).hexdigest()
    for key, value in flatten(_plain(config)):
        inner = {name: part for name, part in values.items() if f"{name}.".startswith(f"{key}.")}
        if inner != {key: value} and lacks_secret(key, value):
            salt = like.get(key, "").removeprefix(_HIDDEN).partition(" ")[0] or secrets.token_hex(8)
            digest = hashlib.scrypt(as_text(inner).encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=2)
            digests[key] = f"{_HIDDEN}{salt} {digest.hex()}"
    for key, value in values.items():
        written = [found[0] for text in _texts(value) if (found := DIGEST.search(text))]
        named = dict.fromkeys(Path(parse_code(text).source) for text in _texts(value))
        files = [file for file in named if file.suffix == ".py" and file.is_file()]
        if files or written:
            digests[key] = " ".join([*(digest_file(file).blake2b for file in files), *written])
    return digests


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _edited(
    before: Mapping[str, Any], after: Mapping[str, Any], old_code: Mapping[str, str], code: Mapping[str, str]
) -> list[str]:
    """Keys that name the same Python file as before, whose content has changed, or whose value is not saved and has."""
    same = (key for key in code if before.get(key) == after.get(key) and not code[key].startswith(_VALUE))
    changed = [key for key in same if key in old_code and code[key] != old_code[key]]
    hidden = [f"{key} has another value, which is not saved" for key in changed if code[key].startswith(_HIDDEN)]
    return hidden + [f"{key}: {after[key]} was edited" for key in changed if not code[key].startswith(_HIDDEN)]


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config by dotted key, without keys that have no effect because of other keys."""
    flat = dict(flatten(config))
    if flat.get("data.seed") is None:
        flat["data.seed"] = flat.get("trainer.seed")
    on = [switch for switch in _IDLE if any(flat[key] for key in flat if key == switch or key.startswith(f"{switch}."))]
    idle = tuple(start for switch, starts in _IDLE.items() if switch not in on for start in starts)
    return {key: value for key, value in flat.items() if not key.startswith(idle)}


def identify_prompts(prompts: Sequence[TokenizedPrompt]) -> dict[str, Any]:
    """The number of training prompts, and a fingerprint of their content and order.

    System messages, the chat template, and the name of a file that stands for a data source change no positions.
    """
    digest = hashlib.blake2b(digest_size=16)
    for prompt in (tokenized.prompt for tokenized in prompts):
        asked = [message for message in prompt.messages if message.get("role") != "system"]
        source = None if SOURCE_KEY in prompt.taken else prompt.data_source
        digest.update(json.dumps([source, asked, prompt.ground_truth], default=str).encode())
        for image in prompt.images:
            digest.update(image if isinstance(image, bytes) else image.encode())
    return {"count": len(prompts), "fingerprint": digest.hexdigest()}


def _rate_depends_on_length(flat: Mapping[str, Any], optim: str) -> bool:
    warms_up = flat.get(f"{optim}.lr_warmup_steps", -1) < 0 and flat.get(f"{optim}.lr_warmup_steps_ratio", 0) > 0
    return warms_up or flat.get(f"{optim}.lr_scheduler_type", "constant") != "constant"
