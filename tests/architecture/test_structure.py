"""Where tests are, and how large files and functions may grow."""

import ast
from collections.abc import Iterator
from pathlib import Path

import grpo_dist
from tests.sources import parsed

PACKAGE = Path(grpo_dist.__file__).parent
ROOT = PACKAGE.parent
MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 80

PYTHON_FILES = sorted(
    path
    for folder in ("grpo_dist", "tests", "scripts", "examples", "benchmarks", "conformance")
    for path in (ROOT / folder).rglob("*.py")
)


def long_functions(source: str | Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of the functions that are too long, decorators not counted."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                yield node.name, lines


def test_every_room_has_tests() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if any(path.glob("**/[!_]*.py"))}
    assert {room for room in rooms if not any((ROOT / "tests" / room).rglob("test_*.py"))} == set()


def test_files_and_functions_stay_short() -> None:
    assert [path for path in PYTHON_FILES if path.read_text().count("\n") > MOST_FILE_LINES] == []
    assert {path: found for path in PYTHON_FILES if (found := list(long_functions(path)))} == {}


def test_long_functions_are_found_wherever_they_are() -> None:
    body = "\n".join(["        pass"] * MOST_FUNCTION_LINES)
    source = f"class A:\n    async def f(self):\n{body}\n\n    def g(self):\n        pass\n"
    assert list(long_functions(source)) == [("f", MOST_FUNCTION_LINES + 1)]


def test_no_catch_all_modules() -> None:
    names = {path.stem for path in PYTHON_FILES}
    assert names.isdisjoint({"utils", "util", "helpers", "misc", "common"})
