"""Programs with tests: which columns are read, what passes, and what a program cannot gain by cheating."""

import json
from typing import Any

import pytest

from grpo_dist.errors import ConfigError, DataError
from grpo_dist.rewards import load_reward_function
from grpo_dist.sandbox.base import VARIABLE
from grpo_dist.tasks.code import compute_score
from tests.messages import refuses
from tests.tiers import first

pytestmark = pytest.mark.usefixtures("bwrap")


def score(program: str | list[str], row: dict[str, Any], **options: Any) -> list[float]:
    """The scores of responses with these programs."""
    programs = [program] if isinstance(program, str) else program
    texts = [f"I think.\n```python\n{each}\n```" for each in programs]
    columns = {name: [value] * len(texts) for name, value in row.items()}
    return [found["score"] for found in compute_score(texts, **columns, **options)]


SUM = "print(sum(map(int, input().split())))"
ADD = "def add(a, b):\n    return a + b"
TACO = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}
NAMED = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}
LCB = [{"input": "1 2", "output": "3", "testtype": "stdin"}]
LCB_NAMED = [{"input": "[1, 2]\n[3]", "output": "[1, 2, 3]", "testtype": "functional"}]
LCB_ROW = {"private_test_cases": json.dumps(LCB_NAMED), "metadata": '{"func_name": "add"}'}
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"
MBPP = {"test_list": ["assert add(1, floor(2.5)) == 3", "assert abs(add(1, -2)) < isqrt(4)"]}
MBPP |= {"test_setup_code": "from math import floor", "test_imports": ["from math import isqrt"]}
HUMANEVAL = {"test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(0, 0) == 0", "entry_point": "add"}
FILE = {"test_file": "from solution import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"}


ROWS = {
    "TACO": ({"ground_truth": json.dumps(TACO)}, SUM, "print(3)"),
    "APPS": ({"input_output": json.dumps(TACO)}, SUM, "print(3)"),
    "white space": ({"ground_truth": TACO}, f"{SUM[:-1]}, end='  \\n\\n')", "print('3\\n34')"),
    "function": ({"ground_truth": NAMED}, ADD, ADD.replace("+", "-")),
    "method": ({"input_output": json.dumps(NAMED)}, METHOD, METHOD.replace("a + b", "3")),
    "LCB": ({"public_test_cases": json.dumps(LCB)}, SUM, "print('3 ', 4)"),
    "LCB's function": (LCB_ROW, ADD, "def add(a, b): ..."),
    "MBPP": (MBPP, ADD, ADD.replace("+", "*")),
    "assertions": ({"ground_truth": ["assert add(1, 2) == 3", "assert abs(add(1, -2)) < 2"]}, ADD, "add = 3"),
    "HumanEval": (HUMANEVAL, ADD, ADD.replace("a + b", "3")),
    "file": (FILE, ADD, ADD.replace("+", "-")),
}


@pytest.mark.parametrize("kind", first(ROWS, "TACO", "method", "LCB's function", "MBPP", "HumanEval"))
def test_rows_of_public_sets_are_scored(kind: str) -> None:
    row, right, wrong = ROWS[kind]
    assert score([right, wrong], row) == [1.0, 0.0]


def test_a_score_is_all_or_the_share() -> None:
    row = {"ground_truth": {"inputs": ["1 2", "3 4", "5 6", "7 8"], "outputs": ["3", "7", "0", "15"]}}
    assert score(SUM, row) == [0.0]
    assert score(SUM, row, partial=True) == [0.75]
    assert compute_score(["No program here."], [TACO]) == [{"score": 0.0, "acc": 0.0, "no_code": 1.0}]
    two = [{"role": "assistant", "content": f"```python\nprint(1)\n```\nNo:\n```\n{SUM}\n```"}]
    assert compute_score([two], [TACO]) == [{"score": 1.0, "acc": 1.0, "no_code": 0.0}], "the last one, of messages"


def test_a_response_does_not_share_files_with_another_one() -> None:
    leaves = "import os\nprint(3 if os.path.exists('left') else sum(map(int, input().split())))\nopen('left', 'w')"
    row = {"ground_truth": {"inputs": ["1 1"], "outputs": ["2"]}}
    assert score([leaves, leaves], row) == [1.0, 1.0]


CHEATS = {
    "leaves early": "import os, sys\nsys.stdout.write('\\n3\\n')\nsys.stdout.flush()\nos._exit(0)",
    "is equal to all": "class All(int):\n    __eq__ = lambda *_: True\n    __hash__ = None\nadd = lambda *_: All()",
    "hangs": "while True: pass",
    "raises": "raise SystemExit(0)",
    "asks for the answer": "add = lambda *_: open('/proc/self/environ').read()",
    "rewrites what the harness imports": "open('json.py', 'w').write('dumps = lambda _: 3')\nadd = lambda *_: 0",
}


@pytest.mark.parametrize("name", first(CHEATS, "leaves early", "is equal to all", "rewrites what the harness imports"))
def test_nothing_but_right_values_earns_anything(name: str) -> None:
    for row in ({"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}, {"ground_truth": NAMED}):
        assert score(CHEATS[name], row, timeout_s=2.0 if name == "hangs" else 20.0) == [0.0]


def test_code_that_ends_before_its_tests_has_not_passed_them() -> None:
    assert score("import os\nos._exit(0)", HUMANEVAL) == [0.0]


def test_a_run_is_refused_where_programs_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    function = load_reward_function("grpo_dist.tasks.code", "compute_score", {"partial": True})
    assert (function.form, function.needs.ground_truth, function.needs.taken) == ("trl", False, None)
    monkeypatch.setenv(VARIABLE, json.dumps({"backend": "docker", "image": "mine"}))
    monkeypatch.setenv("PATH", "")
    with refuses(ConfigError, "sandbox.backend=docker"):
        load_reward_function("grpo_dist.tasks.code", "compute_score", {})


def test_rows_without_tests_are_refused() -> None:
    with refuses(DataError, "tests"):
        compute_score(["```python\n1\n```"], ["42"])
    with pytest.raises(ValueError, match="shorter"):
        compute_score(["```python\n1\n```"], [{"inputs": ["1", "2"], "outputs": ["1"]}])
