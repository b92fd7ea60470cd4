"""What a config takes from the environment: of a value (`${oc.env:NAME}`) the reference is saved, never the value.

A run uses the values; whoever reads the saved config back takes them from its own environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from omegaconf.base import Container
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from grpo_dist.errors import ConfigError
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
    """A config's values, plain dicts and lists, as shown and saved: no secrets, references to the environment."""
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
        text = ",".join([f"{_RESOLVER}:{name}", *("null" if value is None else str(value) for value in default)])
        hide_in_texts(os.environ.get(name, ""), f"${{{_RESOLVER}:{name}}}")
        return f"${{{text}}}"

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
