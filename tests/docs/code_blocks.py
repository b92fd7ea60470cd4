"""The fenced blocks of a page, and what is wrong with them: programs, options and keys are read as they would be.

A bash that finds no program runs the commands and records each as it has expanded it; a variable that the block does
not set has its name in capitals as its value. `...` stands for further arguments, a value in capitals for the reader's.
"""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import yaml

from grpo_dist.cli.entry import ENTRIES
from grpo_dist.cli.entry import main as grpo_dist_main
from grpo_dist.config.command import AnyCommand
from grpo_dist.config.keys import config_error
from grpo_dist.config.load import default_values, load_command, read_command_line, with_overrides
from grpo_dist.errors import GrpoDistError
from grpo_dist.main import QUIET
from grpo_dist.plan.commands import COMMANDS, GRPO
from tests.sources import parsed

ROOT = Path(__file__).parents[2]
LANGUAGES = {"bash", "console", "python", "json", "yaml", "toml", "text"}
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>.*)\n(?P<text>(?:.*\n)*?) *(?P=fence)`* *$", re.MULTILINE
)
PROMPT = re.compile(r"^\w*\$ +", re.MULTILINE)  # of a console, before a command; the other lines are answers
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
PROGRAM = re.compile(r"(?<![\w./$-])[\w.-]*(?:/[\w.-]+)+")  # a command with a path
END = "\x1e"  # of a recorded command; its arguments end in \0
# `.` and `source` would read files, the others end the shell or go elsewhere.
SHELL = r"""exec 9> .recorded
command_not_found_handle() { printf '%s\0' "$@" >&9; printf '\036' >&9; }
for name in . source exec exit cd; do eval "$name() { :; }"; done
"""
OWN_FILE = re.compile(r"(?<![\w./-])(?:examples|scripts|benchmarks|constraints|conformance)/[\w./-]+")
PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
PLACEHOLDER = re.compile(r"[^=]+=[A-Z][A-Z_]*")
AND_SO_ON = "..."
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


class Block(NamedTuple):
    language: str
    text: str
    line: int  # of the page, in which the text begins


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, without their indentation."""
    return [
        Block(
            found["language"].strip(),
            re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            page[: found.start("text")].count("\n") + 1,
        )
        for found in FENCE.finditer(page)
    ]


def faults(block: Block) -> Iterator[str]:
    """What is wrong with a block, but for Python."""
    if block.language not in LANGUAGES:
        yield f"{block.language!r} is none of the languages {', '.join(sorted(LANGUAGES))}"
    elif block.language == "bash":
        yield from shell_faults(block.text)
    elif block.language == "console":
        commands = [re.split(r"(?<!\\)\n", part)[0] for part in PROMPT.split(block.text)[1:]]
        yield from shell_faults("\n".join(commands)) if commands else ["no line begins with $"]
    elif block.language in ("json", "yaml", "toml"):
        try:
            _read_data(block)
        except (ValueError, yaml.YAMLError, GrpoDistError) as error:
            yield str(error)


def _read_data(block: Block) -> None:
    """Read JSON (also JSON lines), YAML or TOML, and what is a piece of the config."""
    if block.language == "json":
        try:
            json.loads(block.text)
        except ValueError:
            [*map(json.loads, block.text.splitlines())]
        return
    values = yaml.safe_load(block.text) if block.language == "yaml" else tomllib.loads(block.text)
    if isinstance(values, Mapping) and values.keys() <= default_values(GRPO).keys():
        with_overrides({}, list(values.items()), GRPO)


# --- commands ------------------------------------------------------------------------------------------------------
def shell_faults(text: str) -> Iterator[str]:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if checked.stderr:  # a heredoc without its end is a warning
        yield checked.stderr
        return
    for command in recorded(text):
        yield from (f"{' '.join(command)}: {fault}" for fault in command_faults(command))


def recorded(text: str) -> list[list[str]]:
    """The commands that bash would run, expanded; those of substitutions too."""
    paths = "".join(f'{name}() {{ command_not_found_handle {name} "$@"; }}\n' for name in set(PROGRAM.findall(text)))
    environment = {name: name.upper() for name in VARIABLE.findall(text)} | {"PATH": "/nowhere"}
    with TemporaryDirectory() as folder:
        script = ["/bin/bash", "-c", SHELL + paths + text]
        subprocess.run(script, env=environment, cwd=folder, check=False, capture_output=True, timeout=20)
        written = (Path(folder) / ".recorded").read_text()
    return [command.removesuffix("\0").split("\0") for command in written.split(END)[:-1]]


def command_faults(command: Sequence[str]) -> Iterator[str]:
    program, *arguments = (word for word in command if word != AND_SO_ON)
    partial = AND_SO_ON in command
    for name in (name for word in arguments for name in OWN_FILE.findall(word) if not (ROOT / name).exists()):
        yield f"there is no {name}"
    if program == "make":
        yield from (f"make has no target {word}" for word in arguments if "=" not in word and word not in TARGETS)
    for extra in re.findall(r"(?:grpo_dist|\.)\[([\w,-]+)\]", " ".join(arguments)) if program.endswith("pip") else ():
        yield from (f"there is no extra {name}" for name in set(extra.split(",")) - EXTRAS)
    try:
        if Path(program).name == "grpo-dist":
            _read_command(arguments, partial=partial)
        elif PYTHON.fullmatch(program) and arguments:
            _read_python(arguments, partial=partial)
        elif program in ("bash", "sbatch") and OWN_FILE.search(" ".join(arguments)):  # they hand them on to the command
            _read_keys([word for word in arguments if "=" in word and word[0] != "-"], GRPO, partial=True)
    except (ValueError, SyntaxError, ImportError, AttributeError, GrpoDistError) as error:
        yield str(error)


def _read_python(arguments: Sequence[str], *, partial: bool) -> None:
    first, *rest = arguments
    if first == "-c":
        resolve_imports(rest[0])
        return
    name, rest = (rest[0], rest[1:]) if first == "-m" else (first.removesuffix(".py").replace("/", "."), rest)
    top = name.partition(".")[0]
    if top not in ("grpo_dist", "scripts", "benchmarks", "conformance"):
        return
    found = importlib.util.find_spec(name)
    if found is None:
        raise ImportError(f"there is no module {name}")
    if top == "grpo_dist":  # the words behind `grpo-dist` that stand for it
        named = [entry for entry, (function, _) in ENTRIES.items() if function == f"{name}:main"]
        words = [] if name == "grpo_dist" else named or [name.rpartition(".")[2]]
        _read_command([*words, *rest], partial=partial)
        return
    module = importlib.import_module(f"{name}.__main__" if found.submodule_search_locations else name)
    if hasattr(module, "argparse"):  # else it takes no options, and would run
        with mock.patch("sys.argv", [name, *rest]):
            _parsed(module.main, [rest] if inspect.signature(module.main).parameters else [])


def _read_command(words: Sequence[str], *, partial: bool) -> None:
    name, *arguments = words
    if name in COMMANDS:
        _read_keys([word for word in arguments if word != QUIET], COMMANDS[name], partial=partial)
        return
    options = _parsed(grpo_dist_main, [[*words]])
    given = getattr(options, "overrides", None) or getattr(options, "named", ())
    _read_keys([word for word in given if "=" in word], GRPO, partial=True)


class Parsed(Exception):
    """What a command's parser has read."""


def _parsed(main: Callable[..., Any], arguments: Sequence[list[str]]) -> argparse.Namespace:
    """What the parser in a command's main function makes of its arguments; the command itself does not run."""

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
            return read.args[0]
        except SystemExit as error:
            code = error.code
    if code:
        raise ValueError(said.getvalue())
    return argparse.Namespace()


def _read_keys(overrides: Sequence[str], command: AnyCommand, *, partial: bool) -> None:
    """Read keys and values; all that a run checks before it looks at files, unless some are left out."""
    if problems := read_command_line(overrides, command).problems:
        raise config_error(problems)
    written = []
    for each in overrides:
        with contextlib.suppress(GrpoDistError):  # a placeholder that is of another type
            if PLACEHOLDER.fullmatch(each):
                with_overrides({}, [each], command)
            written.append(each)
    if partial:
        with_overrides({}, written, command)
    else:
        load_command([*written, "trainer.dry_run=config"], command)


# --- Python --------------------------------------------------------------------------------------------------------
def run_in_order(sources: Mapping[int, str], page: str) -> dict[str, Any]:
    """Run blocks, by the line of the page in which they begin, in one namespace, one after the other; returns it."""
    namespace: dict[str, Any] = {"__name__": page}
    for line, source in sources.items():
        exec(compile("\n" * (line - 1) + source, page, "exec"), namespace)
    return namespace


def resolve_imports(source: str) -> None:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("grpo_dist."):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                getattr(module, alias.name)
        for alias in node.names if isinstance(node, ast.Import) else ():
            if f"{alias.name}.".startswith("grpo_dist."):
                importlib.import_module(alias.name)
