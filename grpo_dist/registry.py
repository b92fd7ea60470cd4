"""Looks up functions by name.

A `Registry` holds the built-in functions of one kind, all with the same signature. A name with a colon,
`pkg.module:attr` or `path/to/file.py:attr` (`parse_code`), is imported on demand in each process that uses it, so
custom code needs neither registration nor a fork.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_dist.code_names import parse_code
from grpo_dist.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind by name.

    Args:
        kind: what the functions are, for messages ("advantage estimator").
        key: the config key that names one, for messages ("algorithm.adv_estimator").
    """

    def __init__(self, kind: str, key: str) -> None:
        self.kind, self.key = kind, key
        self._functions: dict[str, F] = {}
        self._needs: dict[str, tuple[str, ...]] = {}
        self._custom: dict[str, F] = {}

    def register(self, *names: str, needs: tuple[str, ...] = ()) -> Callable[[F], F]:
        """Decorator: register a function under one or more names, each of which must be new.

        Args:
            names: the function's names.
            needs: names of the inputs that the function needs besides those of all functions of its kind.
        """

        def add(function: F) -> F:
            for name in names:
                if name in self._functions:
                    other = self._functions[name]
                    raise ValueError(
                        f"{self.kind} {name!r} is registered twice: {other.__module__}, {function.__module__}"
                    )
                self._functions[name] = function
                self._needs[name] = needs
            return function

        return add

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._functions)

    def needs(self, name: str) -> tuple[str, ...]:
        """The additional inputs of a function; a custom function lists them in its attribute `needs`.

        Raises:
            ConfigError: no such name.
        """
        return self._needs[name] if name in self._needs else tuple(getattr(self.get(name), "needs", ()))

    def get(self, name: str) -> F:
        """The function called `name`, or the attribute that `module:attr` points to.

        Raises:
            ConfigError: there is no such name; the message lists the names and suggests the closest one.
        """
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            # cached, because the policy looks up its KL estimator in every micro-batch
            if name not in self._custom:
                self._custom[name] = load_attribute(name, key=self.key)
            return self._custom[name]
        nearest = difflib.get_close_matches(name, self._functions, n=1)
        hint = f"; did you mean {nearest[0]!r}" if nearest else ""
        raise ConfigError(f"{self.key}={name}: no such {self.kind}{hint}. Known: {', '.join(self.names())}")


def load_attribute(spec: str, *, key: str) -> Any:
    """Import `pkg.module:attr` or `path/to/file.py:attr`.

    Args:
        spec: module or file, and attribute.
        key: the config key that names it, for messages.

    Raises:
        ConfigError: the module cannot be imported or has no such attribute.
    """
    source, attribute = parse_code(spec)
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise ConfigError(f"{key}={spec}: cannot import {source}: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        nearest = difflib.get_close_matches(attribute, public, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; it has {', '.join(public) or 'no functions'}"
        raise ConfigError(f"{key}={spec}: {source} has no {attribute!r}{hint}") from None


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} (looked in {Path.cwd()})")
    module = _executed(path.absolute(), path.read_bytes())
    sys.modules[module.__name__] = module
    return module


@cache
def _executed(path: Path, text: bytes) -> Any:
    """The module of a file with this text: several functions of one file share it."""
    name = f"grpo_dist_custom_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    return module
