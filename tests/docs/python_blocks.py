"""What is wrong with the Python of a page."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tests.sources import parsed


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
