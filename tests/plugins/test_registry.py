"""Code by name: what is registered, what is in a module or a file, and functions that other processes load."""

import ast
import json
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from grpo_dist.errors import ConfigError
from grpo_dist.plugins import registry
from grpo_dist.plugins.names import absolute, parse_code
from grpo_dist.plugins.registry import Registry, function_name, load_attribute, write_function
from tests.messages import refuses


def shapes() -> Registry:
    registry: Registry = Registry("shape", "draw.shape")
    registry.register("circle", "disc")(lambda: "o")
    registry.register("square")(lambda: "#")
    registry.register("polygon", needs=("corners",))(lambda: "P")
    return registry


def test_a_function_says_what_it_needs(tmp_path: Path) -> None:
    registry = shapes()
    assert registry.names() == ["circle", "disc", "polygon", "square"]
    assert (registry.get("disc")(), registry.get("square")()) == ("o", "#")
    assert registry.needs("polygon") == ("corners",)
    assert registry.needs("disc") == ()
    assert registry.needs("json:dumps") == ()
    (mine := tmp_path / "mine.py").write_text("def star(): ...\nstar.needs = ('corners', 'colour')\n")
    assert registry.needs(f"{mine}:star") == ("corners", "colour")


def test_unknown_name_lists_the_names_and_the_nearest() -> None:
    for look_up in (shapes().get, shapes().needs):
        with refuses(ConfigError, "draw.shape=sqare", "'square'", "circle, disc, polygon, square"):
            look_up("sqare")
    with refuses(ConfigError, "draw.shape=zzz", "circle, disc, polygon, square") as caught:
        shapes().get("zzz")
    assert "'" not in str(caught.value), "nothing is near"
    with refuses(ValueError, "shape", "'disc'", "twice"):
        shapes().register("disc")(lambda: "other")


READ = "import pickle, sys; print([function() for function in pickle.load(sys.stdin.buffer)])"


def test_files_of_one_name_stay_apart_also_in_another_process(tmp_path: Path) -> None:
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
    for other in ("relative%2Freward%2Epy", "%2Fno%2Fsuch%2Ffile%2Epy", "helper", "%2Ftmp/reward.py"):
        assert registry.find_spec(f"{registry.__name__}.{other}") is None


def test_functions_of_one_file_share_its_module_until_it_is_edited(tmp_path: Path) -> None:
    file = tmp_path / "shared.py"
    file.write_text("seen = []\ndef a(): return seen\ndef b(): return seen\n")
    first = load_attribute(f"{file}:a", key="k")()
    assert load_attribute(f"{file}:b", key="k")() is first
    file.write_text("seen = [1]\ndef a(): return seen\n")
    assert load_attribute(f"{file}:a", key="k")() == [1]


def test_mistakes_in_custom_code_are_named(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("def compute_score(): ...\n")
    (broken := tmp_path / "broken.py").write_text("import no_such_package_at_all\n")
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
    return FACTOR * value


@dataclass
class Adder:
    number: int

    def __call__(self, value: int) -> int:
        return self.number + value


def test_functions_objects_and_lambdas_work_in_other_processes(tmp_path: Path) -> None:
    """In one that cannot import this module."""
    functions = (triple, Adder(5), lambda value: value * value)
    specs = [write_function(each, function_name(each), tmp_path, "key") for each in functions]
    load = "from grpo_dist.plugins.registry import load_attribute; "
    command = [sys.executable, "-P", "-c", load + f"print([load_attribute(each, key='key')(4) for each in {specs!r}])"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ast.literal_eval(done.stdout) == [12, 9, 16]
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
import json, sys
from pathlib import Path
from grpo_dist.plugins.registry import write_function
for line, code in json.load(sys.stdin):
    cell = {"__name__": "__main__"}
    exec(compile("\\n" * line + code, f"/tmp/cell_{line}.py", "exec"), cell)
    print([write_function(each, name, Path(sys.argv[1]), "key") for name, each in cell["made"].items()])
"""
EDITS = (
    ("again(n - 1)", "again(n - 2)", "score part Judge"),
    ('"r"}', '"s"}', "score part Judge"),
    ('"d"}', '"e"}', "score part Judge"),
    ("FACTOR = 3", "FACTOR = 4", "score part Judge"),
    ("weight=5", "weight=6", "part"),
    ("self.weight = 4", "self.weight = 5", "Judge"),
    ("self.weight * helper", "self.weight + helper", "Judge"),
)


def test_the_folder_tells_an_edited_function_from_one_that_another_kernel_has(tmp_path: Path) -> None:
    """Whatever the cell's file, its line and the order of its sets are."""

    def written(*cells: tuple[int, str]) -> list[list[str]]:
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        done = subprocess.run(command, input=json.dumps(cells), capture_output=True, text=True, check=True)
        return [ast.literal_eval(line) for line in done.stdout.splitlines()]

    (first,) = written((0, CELL))
    assert all(old in CELL for old, _, _ in EDITS)
    same, *edited = written((7, CELL), *((0, CELL.replace(old, new)) for old, new, _ in EDITS))
    assert same == first
    for now, (_, _, changed) in zip(edited, EDITS, strict=True):
        assert [spec.rpartition(":")[2] for spec, had in zip(now, first, strict=True) if spec != had] == changed.split()
    assert all(Path(spec.rpartition(":")[0]).is_file() for spec in first), "those of the run before stay"


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with refuses(ConfigError, "reward_funcs", "locked", "file.py:function"):
        write_function(lambda value: lock, "locked", Path("unused"), "reward_funcs")


def test_a_file_that_others_could_have_written_is_not_read(tmp_path: Path) -> None:
    spec = write_function(triple, "triple", tmp_path, "key")
    path = Path(spec.rpartition(":")[0])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    with refuses(ConfigError, f"custom_reward_function.path={spec}", "PermissionError"):
        load_attribute(spec, key="custom_reward_function.path")


# --- how code is named ------------------------------------------------------------------------------------------------
def test_how_code_is_named_and_paths_of_files_become_absolute() -> None:
    for text, source, attribute in (
        ("a/b.py:f", "a/b.py", "f"),
        ("a/b.py", "a/b.py", "other"),
        ("pkg.module:Class", "pkg.module", "Class"),
        ("pkg.module", "pkg.module", "other"),
        ("file:///a/b.py:f", "/a/b.py", "f"),
        ("pkg://pkg.module", "pkg.module", "other"),
        ("~/b.py:f", str(Path.home() / "b.py"), "f"),
        ("b.py:not one", "b.py:not one", "other"),
        (":f", ":f", "other"),
    ):
        assert parse_code(text, "other") == (source, attribute)
    assert absolute("b.py:f") == absolute("file://b.py:f") == f"{Path.cwd()}/b.py:f"
    assert absolute("b.py") == f"{Path.cwd()}/b.py"
    assert (absolute("grpo"), absolute("pkg://pkg.module:f")) == ("grpo", "pkg.module:f")
