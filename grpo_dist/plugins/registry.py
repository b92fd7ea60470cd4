"""Looks up functions by name.

A `Registry` holds the built-in functions of one kind, all with the same signature. A name with a colon,
`pkg.module:attr` or `path/to/file.py:attr` (`parse_code`), is imported on demand in each process that uses it, so
custom code needs neither registration nor a fork. Where custom code raises, or returns what would be an error of the
package later, the message names it.

Functions that were given as objects, such as those of a notebook, which are in no module, are written into files that
worker processes read. cloudpickle writes code by value, and reading such a file runs code: so the file belongs to the
user alone, and one that others could have written is refused.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import io
import os
import re
import stat
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Generic, TypeVar
from urllib.parse import quote, unquote

from grpo_dist.errors import ConfigError, GrpoDistError, did_you_mean
from grpo_dist.plugins.names import parse_code

F = TypeVar("F", bound=Callable[..., Any])

SHOWN_FRAMES = 3  # of a failing function, in messages: where it was called, and the innermost ones
SHOWN_TRACEBACK = 2000  # characters of those frames and of what was raised
SHOWN_VALUE = 100  # characters of a value

# (what was returned, what must be), in words.
Fault = tuple[str, str]


class Registry(Generic[F]):
    """Functions of one kind by name.

    Args:
        kind: what the functions are, for messages ("advantage estimator").
        key: the config key that names one, for messages ("algorithm.adv_estimator").
        parameters: the positional arguments that functions of the kind are called with.
        fault: says from what custom code returned, and its arguments, what is wrong; without it nothing is checked.
    """

    def __init__(
        self, kind: str, key: str, parameters: tuple[str, ...] = (), fault: Callable[..., Fault | None] | None = None
    ) -> None:
        self.kind, self.key, self.parameters, self.fault = kind, key, parameters, fault
        self._functions: dict[str, F] = {}
        self._needs: dict[str, tuple[str, ...]] = {}
        self._custom: dict[tuple[str, str], F] = {}

    def register(self, *names: str, needs: tuple[str, ...] = ()) -> Callable[[F], F]:
        """Decorator: register a function under new names; `needs` are inputs that others of its kind do without."""

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
        """The additional inputs of a function; a custom function lists them in its attribute `needs`."""
        return self._needs[name] if name in self._needs else tuple(getattr(self.get(name), "needs", ()))

    def get(self, name: str, key: str | None = None) -> F:
        """The function called `name`, or the attribute that `module:attr` points to; `key` names it in messages.

        A custom function raises a ConfigError where it raises anything else, and where what it returns has a fault.

        Raises:
            ConfigError: there is no such name; the message lists the names and suggests the closest one. Or a custom
                function does not take the arguments of its kind.
        """
        if name in self._functions:
            return self._functions[name]
        key = key or self.key
        if ":" in name:
            # cached, because the policy looks up its KL estimator in every micro-batch
            if (name, key) not in self._custom:
                loaded = load_attribute(name, key=key)
                self._custom[name, key] = loaded if self.fault is None else self._held(name, key, loaded, self.fault)
            return self._custom[name, key]
        hint = did_you_mean(name, self._functions)
        raise ConfigError(f"{key}={name}: no such {self.kind}{hint}; known are {', '.join(self.names())}")

    def _held(self, name: str, key: str, function: Any, look: Callable[..., Fault | None]) -> Any:
        """The function, with a look at what it returns."""
        wanted = ", ".join(self.parameters)
        if not callable(function):
            raise ConfigError(f"{key}={name}: must be a function of ({wanted}), is {described(function)}")
        if not takes(function, *self.parameters):
            has = inspect.signature(function)
            raise ConfigError(f"{key}={name}: the {self.kind} is called with ({wanted}), and takes {has}")

        @functools.wraps(function)
        def held(*arguments: Any) -> Any:
            try:
                returned = function(*arguments)
            except GrpoDistError:
                raise
            except (Exception, SystemExit) as error:
                if type(error).__name__ == "OutOfMemoryError":  # torch's: the passes are too large, not the code wrong
                    raise
                text = f"{key}={name}: the {self.kind} raised {type(error).__name__}"
                raise ConfigError(f"{text}\n{traceback_tail(error)}") from error
            if fault := look(returned, *arguments):
                raise wrong_return(key, name, self.kind, fault)
            return returned

        held.needs = getattr(function, "needs", ())  # type: ignore[attr-defined]  # one of a class is not copied
        return held


def wrong_return(key: str, name: str, kind: str, fault: Fault) -> ConfigError:
    """The error of custom code that returned what it must not."""
    got, expected = fault
    return ConfigError(f"{key}={name}: the {kind} returned {got}; it must return {expected}")


def takes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Tell if a function can be called with these arguments; True where it does not say."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # builtins may have no signature
        return True
    return True


def described(value: Any) -> str:
    """A value in a few words, for messages: of arrays and tensors dtype and shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of length {len(value)}"
    text = repr(value)
    shown = text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}..."
    return shown if value is None else f"{shown} ({type(value).__name__})"


def traceback_tail(error: BaseException) -> str:
    """Return what custom code raised, with its own frames: the first behind the caller's, and the innermost ones."""
    tail = traceback.TracebackException.from_exception(error)
    first, inner = list(tail.stack)[1:2], list(tail.stack)[2:]  # an error in the call itself has none
    tail.stack = traceback.StackSummary.from_list(first + inner[-(SHOWN_FRAMES - 1) :])
    return "".join(tail.format(chain=False)).rstrip()[-SHOWN_TRACEBACK:]


def load_attribute(spec: str, *, key: str) -> Any:
    """Import `pkg.module:attr` or `path/to/file.py:attr`."""
    source, attribute = parse_code(spec)
    try:
        if source.endswith(ENDING):  # one function, as it was given to grpo_dist.train
            return read_function(Path(source))
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise ConfigError(f"{key}={spec}: cannot import {source}: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = did_you_mean(attribute, public) or f"; it has {', '.join(public) or 'no functions'}"
        raise ConfigError(f"{key}={spec}: {source} has no {attribute!r}{hint}") from None


# --- functions as files -------------------------------------------------------------------------------------------
FOLDER, ENDING = "functions", ".pkl"
# In what `write_function` returns.
DIGEST = re.compile(rf"(?<=/{FOLDER}/)[0-9a-f]{{12}}/(?=[^/:]+{re.escape(ENDING)}:)")


def write_function(function: Callable[..., Any], name: str, folder: Path, key: str) -> str:
    """Write a function to `functions/DIGEST/NAME.pkl` in a run's folder; returns `FILE:NAME` for `load_attribute`.

    Code of the module that it stands in goes along, unless that module is an installed package.

    Raises:
        ConfigError: it holds what cannot be written, such as an open file or a lock.
    """
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    own = module is not None and module.__name__ != "__main__" and not _is_installed(module)
    if own:
        cloudpickle.register_pickle_by_value(module)
    try:
        content, digest = cloudpickle.dumps(function), _digest(function)
    except Exception as error:  # of many kinds
        raise ConfigError(
            f"{key}: {name} cannot be sent to other processes ({type(error).__name__}: {error}); open files, locks and "
            "connections in it when it is called, or put it into a file and name that: file.py:function"
        ) from error
    finally:
        if own:
            cloudpickle.unregister_pickle_by_value(module)
    path = folder.absolute() / FOLDER / digest / f"{name}{ENDING}"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    temporary.replace(path)
    return f"{path}:{name}"


def read_function(path: Path) -> Any:
    """Read a function that `write_function` has written."""
    import cloudpickle

    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} is not yours alone to write, and reading it would run the code in it")
        return cloudpickle.load(file)


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, or of a callable object's class."""
    name = getattr(function, "__name__", None) or type(function).__name__
    return "function" if name == "<lambda>" else str(name)


def _digest(function: Callable[..., Any]) -> str:
    """A digest of what goes along with a function, equal in each process: without places of code and orders of sets."""
    import cloudpickle

    def steady(value: Any) -> Any:
        if isinstance(value, CodeType):
            return value.co_code, value.co_names, value.co_varnames, [steady(part) for part in value.co_consts]
        return sorted(map(repr, value)) if isinstance(value, set | frozenset) else value

    def names(code: CodeType) -> set[str]:
        return {*code.co_names}.union(*(names(part) for part in code.co_consts if isinstance(part, CodeType)))

    class Contents(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            reduced = super().reducer_override(value)
            if reduced is NotImplemented or not isinstance(value, FunctionType | type) or value.__module__ == "types":
                return reduced
            if isinstance(value, type):
                inner = {name: part for name, part in vars(value).items() if callable(part) or name[:2] != "__"}
                inner["bases"] = value.__bases__
            else:
                known = value.__globals__
                inner = {name: known[name] for name in sorted(names(value.__code__)) if name in known}
                cells = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())
                inner["code"] = [*map(steady, (value.__code__, value.__defaults__, value.__kwdefaults__, *cells))]
            return dict, (), None, None, ((name, steady(part)) for name, part in inner.items())

    Contents(file := io.BytesIO()).dump(function)
    return hashlib.sha256(file.getvalue()).hexdigest()[:12]


def _is_installed(module: ModuleType) -> bool:
    """Tell if other processes find the module too: it is built in, or belongs to an installed package."""
    file = getattr(module, "__file__", None)
    homes = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    return file is None or module.__name__.startswith("grpo_dist.") or any(Path(file).is_relative_to(h) for h in homes)


# --- files as modules ---------------------------------------------------------------------------------------------
# A file's module has this one's name and the file's path. So files of one name stay apart, and what pickle names in one
# is found in any process that can import this package, such as those of a pool that a reward function starts.
__path__: list[str] = []  # as packages have it, since modules lie below


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} (looked in {Path.cwd()})")
    module = _executed(_module_name(path.absolute()), path.read_bytes())
    sys.modules[module.__name__] = module
    return module


@cache
def _executed(name: str, text: bytes) -> Any:
    """The module of a file with this text: several functions of one file share it."""
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def _module_name(path: Path) -> str:
    return f"{__name__}.{quote(str(path), safe='', errors='surrogateescape').replace('.', '%2E')}"


def find_spec(name: str, *_: Any) -> ModuleSpec | None:
    """Find a file's module, as one of Python's finders."""
    path = Path(unquote(name.removeprefix(f"{__name__}."), errors="surrogateescape"))
    is_one = name == _module_name(path) and path.is_absolute() and path.is_file()
    return importlib.util.spec_from_file_location(name, path) if is_one else None


sys.meta_path.append(sys.modules[__name__])  # type: ignore[arg-type]
