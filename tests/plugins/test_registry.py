import ast
import json.decoder
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins import registry
from grpo_dist.plugins.registry import Registry, function_name, load_attribute, write_function
from tests.messages import refuses, says


def shapes() -> Registry:
    registry: Registry = Registry("shape", "draw.shape")

    @registry.register("circle", "disc")
    def circle() -> str:
        return "o"

    @registry.register("square")
    def square() -> str:
        return "#"

    return registry


def test_names_and_functions() -> None:
    registry = shapes()
    assert registry.names() == ["circle", "disc", "square"]
    assert registry.get("disc")() == "o"
    assert registry.get("square")() == "#"
    assert registry.get("circle") is registry.get("disc")


def test_a_function_says_what_it_needs() -> None:
    registry = shapes()

    @registry.register("polygon", needs=("corners",))
    def polygon() -> str:
        return "P"

    assert registry.needs("polygon") == ("corners",)
    assert registry.needs("disc") == ()
    assert registry.needs("json:dumps") == ()
    with refuses(ConfigError, "draw.shape=sqare"):
        registry.needs("sqare")


def test_a_function_of_ones_own_says_it_in_an_attribute(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def star(): ...\nstar.needs = ('corners', 'colour')\n")
    assert shapes().needs(f"{mine}:star") == ("corners", "colour")


def test_unknown_name_lists_the_names_and_the_nearest() -> None:
    with refuses(ConfigError, "draw.shape=sqare", "'square'", "circle, disc, square"):
        shapes().get("sqare")
    with refuses(ConfigError, "draw.shape=zzz", "circle, disc, square") as caught:
        shapes().get("zzz")
    assert "'" not in str(caught.value), "nothing is near"


def test_a_name_can_be_taken_once() -> None:
    registry = shapes()
    with refuses(ValueError, "shape", "'disc'", "twice"):
        registry.register("disc")(lambda: "other")


def test_custom_code_from_a_module_and_from_a_file(tmp_path: Path) -> None:
    assert shapes().get("json.decoder:JSONDecoder") is json.decoder.JSONDecoder
    file = tmp_path / "my_shapes.py"
    file.write_text("from dataclasses import dataclass\n@dataclass\nclass Star:\n    points: int = 5\n")
    assert shapes().get(f"{file}:Star")().points == 5


READ = "import pickle, sys; print([function() for function in pickle.load(sys.stdin.buffer)])"


def test_files_of_one_name_stay_apart_also_in_another_process(tmp_path: Path) -> None:
    """What is pickled by name, as for a pool of spawned processes, is found by a process that has loaded no file."""
    folders, functions = ("a", "b", "a.b %2F ü", os.fsdecode(b"\xff")), []
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def name():\n    return {folder!a}\n")
        functions.append(load_attribute(f"{tmp_path}/{folder}/reward.py:name", key="k"))
    assert [function() for function in functions] == list(folders)
    content = pickle.dumps(functions)
    assert pickle.loads(content) == functions
    done = subprocess.run([sys.executable, "-c", READ], input=content, capture_output=True, timeout=120, check=True)
    assert ast.literal_eval(done.stdout.decode()) == list(folders)


def test_other_names_below_the_module_of_files_are_none() -> None:
    for name in ("relative%2Freward%2Epy", "%2Fno%2Fsuch%2Ffile%2Epy", "helper", "%2Ftmp/reward.py"):
        assert registry.find_spec(f"{registry.__name__}.{name}") is None


def test_functions_of_one_file_share_its_module_until_it_is_edited(tmp_path: Path) -> None:
    file = tmp_path / "shared.py"
    file.write_text("seen = []\ndef a(): return seen\ndef b(): return seen\n")
    first = load_attribute(f"{file}:a", key="k")()
    assert load_attribute(f"{file}:b", key="k")() is first
    file.write_text("seen = [1]\ndef a(): return seen\n")
    assert load_attribute(f"{file}:a", key="k")() == [1]


def test_mistakes_in_custom_code_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def compute_score():\n    return 1.0\n")
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package_at_all\n")
    for spec, *parts in (
        ("no.such.module:f", "import", "ModuleNotFoundError"),
        (f"{tmp_path}/absent.py:f", "import", "absent.py: FileNotFoundError", Path.cwd()),
        (f"{broken}:f", "ModuleNotFoundError:", "'no_such_package_at_all'"),
        (f"{file}:compute_scor", "'compute_scor'", "'compute_score'"),
        (f"{file}:zzz", "'zzz'", "compute_score"),
    ):
        with refuses(ConfigError, f"k={spec}:", *parts):
            load_attribute(spec, key="k")


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
