"""Functions given as objects reach other processes, with the code of their own module."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.function_files import function_name, write_function
from grpo_dist.plugins.registry import load_attribute
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
    assert {path.name for path in (tmp_path / "functions").iterdir()} == {"triple.pkl", "Adder.pkl", "function.pkl"}


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
