"""What a config takes from its surroundings: values of the environment, the folder that a relative one lies in, and
LoRA's keys from an adapter that training goes on from.

Of a value of the environment (`${oc.env:NAME}`) the reference is saved, never the value.

A run uses the values; whoever reads the saved config back takes them from its own environment.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.base import Container
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from grpo_dist.assets import expanded, is_folder
from grpo_dist.assets.model_folder import read_adapter_folder
from grpo_dist.config.problems import Problem, shown
from grpo_dist.config.schema_roles import ADAPTER_KEY, LORA_RANK
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.redact import hide_in_texts, redact

_RESOLVER = "oc.env"
Place = tuple[str | int, ...]
"""Where a value stands in a config: names of keys and positions in lists."""


def find_references(config: Container, values: Any) -> dict[Place, str]:
    """Find the references to the environment by their places, each in a form that needs nothing else of the config.

    Numbers and switches are no secrets, and stay values. `values` is the config with its interpolations resolved.
    """
    written = OmegaConf.to_container(config, resolve=False)
    if _RESOLVER not in str(written):
        return {}
    with _environment_as_references():
        texts = OmegaConf.to_container(config, resolve=True)
    return dict(_differences(written, texts, values))


def recorded(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a `JobConfig`, plain dicts and lists, as they are shown and saved: without secrets, and with
    references to the environment.
    """
    result: dict[str, Any] = redact(values)
    for (*sections, last), reference in config.references.items():
        inner: Any = result
        for name in sections:
            inner = inner[name]
        if isinstance(inner, dict | list):  # not in a section that is hidden as a whole
            inner[last] = redact({last: reference})[last]
    return result


def from_environment(values: Any, place: Place = ()) -> Any:
    """A copy of saved values, with the values of the present environment for the references to it.

    Raises:
        ConfigError: a variable is not set.
    """
    if isinstance(values, dict):
        return {name: from_environment(value, (*place, name)) for name, value in values.items()}
    if isinstance(values, list):
        return [from_environment(value, (*place, i)) for i, value in enumerate(values)]
    if not isinstance(values, str) or f"${{{_RESOLVER}:" not in values:
        return values
    holder = OmegaConf.create({"value": values})
    try:
        with _environment_as_references():
            holder.value  # noqa: B018 - so that messages show the reference
        return holder.value
    except OmegaConfBaseException as error:
        key = ".".join(map(str, place))
        raise ConfigError(f"{key}={values}: {str(error).partition(chr(10))[0]}; set that variable") from None


@contextmanager
def _environment_as_references() -> Iterator[None]:
    """Resolve references to the environment to themselves; their values are hidden in texts from now on."""

    def reference(name: str, *default: Any) -> str:
        text = (
            ",".join([f"${{{_RESOLVER}:{name}", *("null" if value is None else str(value) for value in default)]) + "}"
        )
        hide_in_texts(os.environ.get(name, ""), f"${{{_RESOLVER}:{name}}}")
        return text

    OmegaConf.register_new_resolver(_RESOLVER, reference, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver(_RESOLVER, oc.env, replace=True)


def _differences(written: Any, text: Any, value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """The places where a config with references for values of the environment is another one."""
    if isinstance(text, Mapping) and isinstance(value, Mapping):
        for name in text:
            inner = written.get(name) if isinstance(written, Mapping) else None
            yield from _differences(inner, text[name], value[name], (*place, name))
    elif isinstance(text, list) and isinstance(value, list) and len(text) == len(value):
        for i, pair in enumerate(zip(text, value, strict=True)):
            yield from _differences(written[i] if isinstance(written, list) else None, *pair, (*place, i))
    elif text != value and not (value is None or isinstance(value, bool | int | float)):
        yield place, written if isinstance(written, str) and "oc.decode" in written else str(text)


# Ray's folder for what `ray job submit --working-dir` sends along; each job's copy is deleted after the job.
WORKING_COPIES = "working_dir_files"


def keep_run_dir(raw: dict[str, Any]) -> list[str]:
    """Put a relative run directory into the home folder where the present one is Ray's working copy of a job; returns
    a note for the user then.
    """
    trainer = raw.get("trainer")
    given = trainer.get("default_local_dir") if isinstance(trainer, dict) else None
    if not isinstance(trainer, dict) or not isinstance(given, str) or not given or expanded(given).is_absolute():
        return []
    here = Path.cwd()
    if WORKING_COPIES not in here.parts:
        return []
    trainer["default_local_dir"] = str(Path.home() / given)
    return [
        f"trainer.default_local_dir={given}: results go to {trainer['default_local_dir']}, because Ray deletes the "
        f"working copy of this job ({here}); set an absolute path, on several machines one on a disk that they share"
    ]


def take_adapter(raw: dict[str, Any], section: str, given: Collection[str]) -> tuple[list[Problem], list[str]]:
    """Put what an adapter says into LoRA's other keys. A folder that does not exist is left to the rules.

    Args:
        raw: the config before it is validated; changed in place.
        section: of LoRA's keys, such as "actor_rollout_ref.model".
        given: the keys that the user has set.

    Returns:
        (what is wrong with the adapter, or contradicts it; keys that have no effect beside it, a note each).
    """
    model: Any = raw
    for name in section.split("."):
        model = model[name]
    path, key = model.get(ADAPTER_KEY), f"{section}.{ADAPTER_KEY}"
    if not isinstance(path, str) or not is_folder(path):
        return [], []
    setting = f"{key}={shown(path)}"
    try:
        adapter = read_adapter_folder(path, setting)
    except DataError as error:
        return [Problem(str(error), (key,))], []
    problems = [
        Problem(
            f"{section}.{name}={shown(model[name])}, {setting}: the adapter has {own}={value:g}, and training goes on "
            f"with that; leave {name} out",
            (f"{section}.{name}", key),
        )
        for name, own, value in ((LORA_RANK, "r", adapter.rank), ("lora_alpha", "lora_alpha", adapter.alpha))
        if f"{section}.{name}" in given and model[name] not in (0, value)
    ]
    idle = [f"{section}.{name}" for name in ("target_modules", "exclude_modules") if f"{section}.{name}" in given]
    model |= {
        LORA_RANK: adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.layers}),
        "exclude_modules": None,
    }
    return problems, [f"{name} has no effect: the layers with factors are those of {setting}" for name in idle]
