"""Programs with tests: what stands in the last ```python block of a response runs in a sandbox.

    +recipe=code data.train_files=rows.jsonl            or custom_reward_function.path=grpo_dist.tasks.code

Rows have their tests in one of these forms, as the ground truth, as columns, or as entries of extra_info; each may be
JSON text:

- {"inputs": [...], "outputs": [...]}: what a program reads and prints; with "fn_name", arguments and value of a
  function, which may be a method of a class Solution (APPS, TACO, verl's prime_code; also as `input_output`);
- [{"input": ..., "output": ...}, ...]: likewise, with `metadata.func_name` (LiveCodeBench, `public_test_cases`);
- `test_list`: assertions, behind `test_setup_code` (MBPP); `test` and `entry_point` (HumanEval); `test_file` (pytest).

Outputs are compared here, line by line without blanks at the ends, and values as JSON; so are both sides of an
assertion such as `f(2) == 4`. Any other test is code that runs beside the response's, which could cheat it.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_dist.errors import DataError
from grpo_dist.sandbox import Outcome, Sandbox, check, open_sandbox

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_CALL = """import json, sys
given, name = json.loads(sys.stdin.read())
import solution
owner = solution.Solution() if hasattr(solution, "Solution") else solution
print("\\n" + json.dumps(getattr(owner, name)(*given)))
"""
_VALUE = """import sys
setup, expression = sys.stdin.read().split("\\0")
names = {}
exec("from solution import *\\n" + setup, names)
print("\\n" + repr(eval(expression, names)))
"""
# A test, asked in a sandbox that has the solution: whether it passes.
Test = Callable[[Sandbox, list[str], float], bool]


def compute_score(
    completions: Sequence[Any],
    ground_truth: Sequence[Any] | None = None,
    *,
    timeout_s: float = 6.0,
    partial: bool = False,
    python: str = sys.executable,
    **columns: Sequence[Any],
) -> list[dict[str, float]]:
    """Score the programs of the responses to a prompt.

    Args:
        timeout_s: seconds that a test may take.
        partial: whether the score is the share of tests that pass; else it is 1 where all of them do.
        python: the interpreter that runs them.

    Returns:
        score, acc (1: all tests pass) and `no_code` (1: there is no block of code) of each.

    Raises:
        DataError: the row has no tests, or they cannot be read.
    """
    row = {name: values[0] for name, values in columns.items() if len(values)}
    tests = list(_tests(_decoded(ground_truth[0]) if ground_truth else None, row))
    if not tests:
        raise DataError("the row has no tests; docs/environments.md#programs-with-tests names the columns")
    return [_scored(completion, tests, python, timeout_s, partial) for completion in completions]


def check_reward_kwargs(**reward_kwargs: Any) -> None:
    """Check before a run that programs can run here; what else it is given, the signature says."""
    check()


def _scored(completion: Any, tests: Sequence[Test], python: str, timeout_s: float, partial: bool) -> dict[str, float]:
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    blocks = _BLOCK.findall(text)
    if not blocks:
        return {"score": 0.0, "acc": 0.0, "no_code": 1.0}
    passed = 0
    with open_sandbox() as sandbox:
        sandbox.put({"solution.py": blocks[-1], "call.py": _CALL, "value.py": _VALUE})
        for test in tests:
            right = test(sandbox, ["env", "PYTHONHASHSEED=0", python], timeout_s)
            if not right and not partial:
                break
            passed += right
    acc = float(passed == len(tests))
    return {"score": passed / len(tests) if partial else acc, "acc": acc, "no_code": 0.0}


def _tests(truth: Any, row: Mapping[str, Any]) -> Iterator[Test]:
    """The tests of a row."""
    truth = {"test_list": truth} if isinstance(truth, list) and all(isinstance(each, str) for each in truth) else truth
    named = {**row, **(truth if isinstance(truth, Mapping) else {})}
    found = {name: _decoded(value) for name, value in named.items() if value is not None}
    name = (found.get("metadata") or {}).get("func_name")
    pairs = truth if isinstance(truth, list) else found.get("input_output", found)
    if isinstance(pairs, Mapping):
        name, inputs, outputs = pairs.get("fn_name", name), pairs.get("inputs", ()), pairs.get("outputs", ())
        pairs = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    for cases in (pairs, found.get("public_test_cases", ()), found.get("private_test_cases", ())):
        for case in cases:
            yield _of_function(name, case) if name else _of_program(case["input"], case["output"])
    setup = "\n".join([*(found.get("test_imports") or ()), found.get("test_setup_code") or ""])
    for assertion in found.get("test_list", ()):
        yield _of_assertion(setup, assertion)
    if "entry_point" in found and "test" in found:
        yield _of_code(f"{found['test']}\ncheck({found['entry_point']})")
    if "test_file" in found:
        yield _of_pytest(found["test_file"])


def _of_program(given: str | list[str], wanted: str | list[str]) -> Test:
    given, wanted = ("\n".join(text) if isinstance(text, list) else text for text in (given, wanted))

    def test(sandbox: Sandbox, python: list[str], timeout_s: float) -> bool:
        outcome = sandbox.exec([*python, "solution.py"], given.encode(), timeout_s)
        return _good(outcome) and _lines(outcome.stdout.decode(errors="replace")) == _lines(wanted)

    return test


def _of_function(name: str, case: Mapping[str, Any]) -> Test:
    given, wanted = case["input"], _decoded(case["output"])
    arguments = [_decoded(line) for line in given.splitlines()] if isinstance(given, str) else given

    def test(sandbox: Sandbox, python: list[str], timeout_s: float) -> bool:
        outcome = sandbox.exec([*python, "call.py"], json.dumps([arguments, name]).encode(), timeout_s)
        value = _decoded(_last(outcome))
        return _good(outcome) and (value == wanted or [value] == wanted)  # APPS has some values in a list

    return test


def _of_assertion(setup: str, assertion: str) -> Test:
    """Both sides of an equation of literals are compared here, where no response can reach them."""
    try:
        match ast.parse(assertion.strip()).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                asked, wanted = f"{setup}\0{ast.unparse(left)}", ast.literal_eval(right)
            case _:
                return _of_code(f"{setup}\n{assertion}")
    except (SyntaxError, ValueError):
        return _of_code(f"{setup}\n{assertion}")

    def test(sandbox: Sandbox, python: list[str], timeout_s: float) -> bool:
        outcome = sandbox.exec([*python, "value.py"], asked.encode(), timeout_s)
        try:
            return _good(outcome) and bool(ast.literal_eval(_last(outcome)) == wanted)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return False

    return test


def _of_code(code: str) -> Test:
    def test(sandbox: Sandbox, python: list[str], timeout_s: float) -> bool:
        mark = secrets.token_hex()  # of a test that has been run to its end
        sandbox.put({"check.py": f"import sys\nfrom solution import *\n{code}\nprint('\\n' + sys.stdin.read())\n"})
        outcome = sandbox.exec([*python, "check.py"], mark.encode(), timeout_s)
        return _good(outcome) and _last(outcome) == mark

    return test


def _of_pytest(source: str) -> Test:
    def test(sandbox: Sandbox, python: list[str], timeout_s: float) -> bool:
        sandbox.put({"test_solution.py": source})
        return _good(sandbox.exec([*python, "-m", "pytest", "-q", "test_solution.py"], b"", timeout_s))

    return test


def _good(outcome: Outcome) -> bool:
    return outcome.exit_code == 0 and not outcome.ended_by


def _last(outcome: Outcome) -> str:
    return outcome.stdout.decode(errors="replace").rstrip("\n").rpartition("\n")[2]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _decoded(value: Any) -> Any:
    """JSON text as what it says; other values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
