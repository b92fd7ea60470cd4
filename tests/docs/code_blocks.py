"""The fenced blocks of a page, and what is wrong with those that are not Python.

A block of commands is run by a bash that finds no program: every command that it calls is recorded instead, as bash has
expanded it. So quotes, variables, comments and line breaks mean what they mean in a reader's shell. A variable that the
block does not set has its name in capitals as its value. What is wrong with a recorded command: `commands.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from grpo_dist.config.load import default_values, with_overrides
from grpo_dist.errors import GrpoDistError
from grpo_dist.plan.commands import GRPO
from tests.docs.commands import command_faults

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


class Block(NamedTuple):
    """A fenced block, and the line of the page in which its text begins."""

    language: str
    text: str
    line: int


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
        yield from data_faults(block)


def shell_faults(text: str) -> Iterator[str]:
    """What is wrong with commands."""
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


def data_faults(block: Block) -> Iterator[str]:
    """What is wrong with JSON (also JSON lines), YAML or TOML, and with what is a piece of the config."""
    try:
        if block.language == "json":
            _read_json(block.text)
        else:
            values = yaml.safe_load(block.text) if block.language == "yaml" else tomllib.loads(block.text)
            if isinstance(values, Mapping) and values.keys() <= default_values(GRPO).keys():
                with_overrides({}, list(values.items()), GRPO)
    except (ValueError, yaml.YAMLError, GrpoDistError) as error:
        yield str(error)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]
