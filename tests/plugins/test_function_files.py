"""Functions given as objects reach other processes, with the code of their own module."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import function_name, load_attribute, write_function
from tests.messages import says

FACTOR = 3


def triple(value: int) -> int:
    """With a name of this module."""
    return FACTOR * value


class Adder:
    """A callable object."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, value: int) -> int:
        return self.number + value


def elsewhere(spec: str, value: int, folder: Path) -> str:
    """What the function returns in a process that cannot import this module."""
    code = f"from grpo_dist.plugins.registry import load_attribute; print(load_attribute({spec!r}, key='key')({value}))"
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=folder
    ).stdout.strip()


def test_functions_objects_and_lambdas_work_in_other_processes(tmp_path: Path) -> None:
    for function, expected in ((triple, "12"), (Adder(5), "9"), (lambda value: value * value, "16")):
        spec = write_function(function, function_name(function), tmp_path, "key")
        assert elsewhere(spec, 4, tmp_path) == expected
    assert {path.name for path in tmp_path.rglob("*.pkl")} == {"triple.pkl", "Adder.pkl", "function.pkl"}


CELL = """
import functools
STOPS = {"a", "b", "c", "d"}
FACTOR = 3
def again(n):
    return n if n < 2 else again(n - 1)
def helper(text):
    return FACTOR * (text in {"p", "q", "r"}) * (text not in STOPS) + again(2)
class Judge:
    def __init__(self):
        self.weight = 4
    def __call__(self, completions):
        return [self.weight * helper(text) for text in completions]
def score(completions, *, weight=1):
    return [weight * helper(text) for text in completions]
made = {"score": score, "part": functools.partial(score, weight=5), "Judge": Judge()}
"""
WRITER = """
import sys
from pathlib import Path
from grpo_dist.plugins.registry import write_function
code, line, folder = sys.argv[1:]
exec(compile("\\n" * int(line) + code, f"/tmp/cell_{line}.py", "exec"))
print([write_function(each, name, Path(folder), "key") for name, each in made.items()])
"""


def test_the_folder_tells_an_edited_function_from_one_that_another_kernel_has(tmp_path: Path) -> None:
    """Whatever the cell's file, its line and the order of its sets are."""

    def written(code: str = CELL, line: int = 0) -> list[str]:
        command = [sys.executable, "-c", WRITER, code, str(line), str(tmp_path)]
        return ast.literal_eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    first = written()
    assert written(line=7) == first
    edits = (
        ("again(n - 1)", "again(n - 2)", "score part Judge"),
        ('"r"}', '"s"}', "score part Judge"),
        ('"d"}', '"e"}', "score part Judge"),
        ("FACTOR = 3", "FACTOR = 4", "score part Judge"),
        ("weight=5", "weight=6", "part"),
        ("self.weight = 4", "self.weight = 5", "Judge"),
        ("self.weight * helper", "self.weight + helper", "Judge"),
    )
    for old, new, changed in edits:
        assert old in CELL
        now = written(CELL.replace(old, new))
        assert [spec.rpartition(":")[2] for spec, had in zip(now, first, strict=True) if spec != had] == changed.split()
    assert all(Path(spec.rpartition(":")[0]).is_file() for spec in first), "those of the run before stay"


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError) as refused:
        write_function(lambda value: lock, "locked", Path("unused"), "reward_funcs")
    says(refused, "reward_funcs", "locked", "file.py:function")


def test_a_file_that_others_could_have_written_is_not_read(tmp_path: Path) -> None:
    spec = write_function(triple, "triple", tmp_path, "key")
    path = Path(spec.rpartition(":")[0])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    with pytest.raises(ConfigError) as refused:
        load_attribute(spec, key="custom_reward_function.path")
    says(refused, f"custom_reward_function.path={spec}", "PermissionError")
