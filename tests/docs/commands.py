"""What is wrong with Python or a command that a page shows: program, options and keys are read as they would be.

In a page some words stand for others: `...` for further arguments, and a value in capitals (`N`, `FOLDER`) for one
of the reader's.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_dist.cli.entry import ENTRIES
from grpo_dist.cli.entry import main as grpo_dist_main
from grpo_dist.config.command import AnyCommand
from grpo_dist.config.keys import config_error
from grpo_dist.config.load import load_command, read_command_line, with_overrides
from grpo_dist.errors import GrpoDistError
from grpo_dist.main import QUIET
from grpo_dist.plan.commands import COMMANDS, GRPO
from tests.sources import parsed

ROOT = Path(__file__).parents[2]
OWN_FILE = re.compile(r"(?<![\w./-])(?:examples|scripts|benchmarks|constraints|conformance)/[\w./-]+")
PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
PLACEHOLDER = re.compile(r"[^=]+=[A-Z][A-Z_]*")
AND_SO_ON = "..."
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


class Parsed(Exception):
    """A command's parser has read its arguments."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options


def command_faults(command: Sequence[str]) -> Iterator[str]:
    """What is wrong with a command and its arguments."""
    program, *arguments = (word for word in command if word != AND_SO_ON)
    for word in arguments:
        for name in OWN_FILE.findall(word):
            if not (ROOT / name).exists():
                yield f"there is no {name}"
    if program == "make":
        yield from (f"make has no target {word}" for word in arguments if "=" not in word and word not in TARGETS)
    for extra in re.findall(r"(?:grpo_dist|\.)\[([\w,-]+)\]", " ".join(arguments)) if program.endswith("pip") else ():
        yield from (f"there is no extra {name}" for name in set(extra.split(",")) - EXTRAS)
    try:
        if Path(program).name == "grpo-dist":
            _read_command(arguments, partial=AND_SO_ON in command)
        elif PYTHON.fullmatch(program) and arguments:
            _read_python(arguments, partial=AND_SO_ON in command)
        elif program in ("bash", "sbatch") and OWN_FILE.search(" ".join(arguments)):  # they hand them on to the command
            _read_keys([word for word in arguments if "=" in word and word[0] != "-"], GRPO, partial=True)
    except (ValueError, SyntaxError, ImportError, AttributeError, GrpoDistError) as error:
        yield str(error)


def _read_python(arguments: Sequence[str], *, partial: bool) -> None:
    """Read `-m MODULE ...`, `-c CODE` or `FILE ...`, where they are of this repository."""
    first, *rest = arguments
    if first == "-c":
        resolve_imports(rest[0])
        return
    name, rest = (rest[0], rest[1:]) if first == "-m" else (first.removesuffix(".py").replace("/", "."), rest)
    top = name.partition(".")[0]
    if top == "grpo_dist":
        _read_command([*_words_of(name), *rest], partial=partial)
    elif top in ("scripts", "benchmarks", "conformance"):
        found = importlib.util.find_spec(name)
        if found is None:
            raise ImportError(f"there is no module {name}")
        module = importlib.import_module(f"{name}.__main__" if found.submodule_search_locations else name)
        if hasattr(module, "argparse"):  # else it takes no options, and would run
            with mock.patch("sys.argv", [name, *rest]):
                _parsed(module.main, [rest] if inspect.signature(module.main).parameters else [])


def _words_of(module: str) -> list[str]:
    """The words behind `grpo-dist` that stand for `python -m MODULE`."""
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"there is no module {module}")
    named = [name for name, (function, _) in ENTRIES.items() if function == f"{module}:main"]
    return [] if module == "grpo_dist" else named or [module.rpartition(".")[2]]


def _read_command(words: Sequence[str], *, partial: bool) -> None:
    """Read the words behind `grpo-dist`."""
    name, *arguments = words
    if name in COMMANDS:
        _read_keys([word for word in arguments if word != QUIET], COMMANDS[name], partial=partial)
        return
    options = _parsed(grpo_dist_main, [[*words]])
    given = getattr(options, "overrides", None) or getattr(options, "named", ())
    _read_keys([word for word in given if "=" in word], GRPO, partial=True)


def _parsed(main: Callable[..., Any], arguments: Sequence[list[str]]) -> argparse.Namespace:
    """What the parser in a command's main function makes of its arguments; the command itself does not run.

    Raises:
        ValueError: it refuses them.
    """

    def stopping(parse: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
        def stop(*args: Any, **kwargs: Any) -> argparse.Namespace:
            raise Parsed(parse(*args, **kwargs))

        return stop

    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for name in ("parse_args", "parse_intermixed_args"):
            parse = stopping(getattr(argparse.ArgumentParser, name))
            stack.enter_context(mock.patch.object(argparse.ArgumentParser, name, parse))
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            code = main(*arguments)
        except Parsed as read:
            return read.options
        except SystemExit as error:
            code = error.code
    if code:
        raise ValueError(said.getvalue())
    return argparse.Namespace()


def _read_keys(overrides: Sequence[str], command: AnyCommand, *, partial: bool) -> None:
    """Read keys and values; all that a run checks before it looks at files, unless some are left out.

    Raises:
        GrpoDistError: something is wrong with them.
    """
    if problems := read_command_line(overrides, command).problems:
        raise config_error(problems)
    written = [each for each in overrides if not PLACEHOLDER.fullmatch(each) or _is_of_type(each, command)]
    if partial:
        with_overrides({}, written, command)
    else:
        load_command([*written, "trainer.dry_run=config"], command)


def _is_of_type(override: str, command: AnyCommand) -> bool:
    try:
        with_overrides({}, [override], command)
    except GrpoDistError:
        return False
    return True


def run_in_order(sources: Mapping[int, str], page: str) -> dict[str, Any]:
    """Run blocks in one namespace, as a reader of the page would who types one after the other.

    Args:
        sources: the blocks by the line of the page in which they begin.
        page: its name, for tracebacks.

    Returns:
        The namespace.
    """
    namespace: dict[str, Any] = {"__name__": page}
    for line, source in sources.items():
        exec(compile("\n" * (line - 1) + source, page, "exec"), namespace)
    return namespace


def resolve_imports(source: str) -> None:
    """Compile, and import what it imports of the package.

    Raises:
        SyntaxError: it is no Python.
        ImportError, AttributeError: a name is not there.
    """
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "grpo_dist":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "grpo_dist":
                    importlib.import_module(alias.name)


def undefined_names(source: str) -> Iterator[str]:
    """Names that nothing defines, also those in functions that nobody calls."""
    options = ["--isolated", "--select=F821", "--output-format=concise", "-q", "-"]
    command = [sys.executable, "-m", "ruff", "check", *options]
    found = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    yield from found.stdout.splitlines()
    yield from found.stderr.splitlines()
