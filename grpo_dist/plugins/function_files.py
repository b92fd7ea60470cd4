"""Functions that were given as objects, in files that worker processes read: those of a notebook are in no module.

cloudpickle writes code by value, and reading such a file runs code. So the file belongs to the user alone, and one that
others could have written is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from grpo_dist.errors import ConfigError

FOLDER, ENDING = "functions", ".pkl"
DIGEST = re.compile(
    rf"(?<=/{FOLDER}/)[0-9a-f]{{12}}/(?=[^/:]+{re.escape(ENDING)}:)"
)  # in what `write_function` returns


def write_function(function: Callable[..., Any], name: str, folder: Path, key: str) -> str:
    """Write a function into a run's folder.

    Code of the module that it stands in goes along, unless that module is an installed package.

    Args:
        name: under which it is found.
        folder: of the run; the file goes to `functions/DIGEST/` in it, and those of other functions stay.
        key: for messages.

    Returns:
        Where it is, as `load_attribute` takes it: `FILE:name`.

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
    """A digest of what goes along with a function, the same in each process that defines it: without the place of the
    code, and the order of sets.
    """
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
