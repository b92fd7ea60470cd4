"""Code that a run's config names, which a command that is given the run's folder runs only if it is told to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.config.keys import flatten, one_line, shown, value_of
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import parse_code
from grpo_dist.redact import REDACTED, lacks_secret

FLAG = "--trust-run-code"

TRUST_KEY = "actor_rollout_ref.model.trust_remote_code"
_ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
_LOSSES = tuple(f"actor_rollout_ref.actor.{name}" for name in ("kl_loss_type", "policy_loss.loss_mode"))
_REWARD = "custom_reward_function"
# What each part of a command takes of the config that may be code.
MODEL, SUPERVISED_MODEL = (TRUST_KEY,), ("model.trust_remote_code",)
ENGINE = (TRUST_KEY, "actor_rollout_ref.rollout.name", _ENGINE_KWARGS)
REWARD = (f"{_REWARD}.path", f"{_REWARD}.reward_kwargs")
UPDATE = ("algorithm.adv_estimator", "algorithm.kl_penalty", *_LOSSES)
TRAINING = (
    *(*ENGINE, *REWARD, *UPDATE, "data.sampler.class_path", "actor_rollout_ref.rollout.agent.default_agent_loop"),
    *("actor_rollout_ref.ref.model.trust_remote_code", "actor_rollout_ref.ref.model.endpoint.base_url"),
    *("reward_model.model.trust_remote_code", "trainer.logger", "ray_kwargs.ray_init.address"),
    "actor_rollout_ref.rollout.agent.agent_kwargs",
)
_BUILT_IN = re.compile(r"grpo_dist\.(rewards|tasks)(\.\w+)+(?<!\.py)(?<!\.pkl)")


def code_of_run(config: Any, keys: Sequence[str], given: Any = None) -> list[str]:
    """Return what a run's config says under these keys that is code, an argument of the engine or an address that the
    reward function asks, as `key=value`. The functions of this package are none.

    Args:
        config: of the run, with what the command line sets.
        given: the defaults, with what the command line sets: that is not the run's; None: nothing is set.
    """
    lines = []
    for key in keys:
        value = value_of(config, key)
        mine = set() if given is None else set(_code(key, value_of(given, key)))
        if not mine.issuperset(_code(key, value)):
            lines.append(one_line(f"{key}={shown(value)}"))
    return lines


def require_trust(file: Path, lines: Sequence[str]) -> None:
    """Refuse what `code_of_run` has found in a file: raises a ConfigError if there is something."""
    if lines:
        raise ConfigError(refusal(file, lines))


def refusal(file: Path, lines: Sequence[str]) -> str:
    """Return why what `code_of_run` has found in a file is not used, and what to do."""
    listed = "\n".join(f"  {line}" for line in lines)
    return (
        f"{file} names code to run, or what to start and ask:\n{listed}\nA command does not take that from a folder, "
        f"which may be somebody else's. If you trust this one, add {FLAG}; or set these keys yourself (key=value)"
    )


def hidden_keys(config: Any, keys: tuple[str, ...] = ("",), given: Any = None) -> list[str]:
    """Return the keys below these that a run has saved without a secret; `given` as in `code_of_run`."""
    values, own = ({} if one is None else dict(flatten(one.model_dump(mode="json"))) for one in (config, given))
    names = (name for name in values if name.startswith(keys) and own.get(name) != values[name])
    return [name for name in names if lacks_secret(name, values[name])]


def hidden(file: Path, config: Any, keys: tuple[str, ...], given: Any) -> str:
    """Return what to do where `hidden_keys` finds something in a file that is needed; "": it does not."""
    names = ", ".join(hidden_keys(config, keys, given))
    why = f"{file} has {REDACTED} in the place of {names}, which is needed here: what looks like a secret is not saved"
    return names and f"{why}. Say it on the command line, as KEY=VALUE"


def _code(key: str, value: Any) -> Iterator[str]:
    if key.startswith(_REWARD):
        yield from _named(value)
    elif isinstance(value, Mapping):  # of an engine or an agent
        yield from (f"{name}={entry}" for name, entry in flatten(value))
    elif value is True or ":" in str(value) or (key.endswith("class_path") and value is not None):
        yield str(value)


def _named(value: Any, name: str = "path") -> Iterator[str]:
    """The functions and addresses in `custom_reward_function`, and in those of a sum; `name`: of the value."""
    if isinstance(value, Mapping):
        for entry, part in value.items():
            yield from _named(part, str(entry))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _named(part, name)
    elif isinstance(value, str):
        if name == "url" or (name == "path" and not _BUILT_IN.fullmatch(parse_code(value).source)):
            yield value
