"""Programs with tests: what stands in the last ```python block of a response runs in a sandbox.

docs/environments.md#programs-with-tests names the forms and columns of tests, each of which may be JSON text, and says
which of them a response could cheat: those that are code, which runs beside the response's.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from grpo_dist.errors import DataError
from grpo_dist.sandbox import check, open_sandbox

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Runs the code of a test, which comes as input with what that reads: no file that a response could change.
_START = "import sys\ncode, _, _given = sys.stdin.read().partition('\\0')\nexec(code)"
_CALL = """import json, solution
name, arguments = json.loads(_given)
owner = solution.Solution() if hasattr(solution, "Solution") else solution
print("\\n" + json.dumps(getattr(owner, name)(*arguments)))
"""
_PYTEST = """import pathlib, pytest
pathlib.Path("test_solution.py").write_text(_given)
sys.exit(pytest.main(["-q", "test_solution.py"]))
"""


class Test(NamedTuple):
    """A program that is run where the solution is, what it is given, and whether what it prints passes."""

    options: Sequence[str]
    given: str
    passes: Callable[[str], bool]


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
    if not (blocks := _BLOCK.findall(text)):
        return {"score": 0.0, "acc": 0.0, "no_code": 1.0}
    passed = 0
    with open_sandbox() as sandbox:
        sandbox.put({"solution.py": blocks[-1]})
        for options, given, passes in tests:
            command = ["env", "PYTHONHASHSEED=0", python, *options]
            code, printed, _, ended_by = sandbox.exec(command, given.encode(), timeout_s)
            right = code == 0 and not ended_by and passes(printed.decode(errors="replace"))
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
        yield _started(_PYTEST, found["test_file"], lambda printed: True)


def _started(code: str, given: str, passes: Callable[[str], bool]) -> Test:
    """The test that code makes of the module `solution`; `passes` gets the last line that is printed."""
    return Test(["-c", _START], f"{code}\0{given}", lambda printed: passes(printed.rstrip("\n").rpartition("\n")[2]))


def _of_program(given: str | list[str], wanted: str | list[str]) -> Test:
    """Outputs are compared line by line, without blanks at the ends."""
    given, wanted = ("\n".join(text) if isinstance(text, list) else text for text in (given, wanted))
    return Test(["solution.py"], given, lambda printed: _lines(printed) == _lines(wanted))


def _of_function(name: str, case: Mapping[str, Any]) -> Test:
    given, wanted = case["input"], _decoded(case["output"])
    arguments = [_decoded(line) for line in given.splitlines()] if isinstance(given, str) else given
    # APPS has some values in a list
    return _started(_CALL, json.dumps([name, arguments]), lambda said: wanted in (_decoded(said), [_decoded(said)]))


def _of_assertion(setup: str, assertion: str) -> Test:
    """Both sides of an equation of literals are compared here, where no response can reach them."""
    with suppress(SyntaxError, ValueError):
        match ast.parse(assertion.strip()).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                wanted = ast.literal_eval(right)
                code = f"from solution import *\n{setup}\nprint('\\n' + repr({ast.unparse(left)}))"
                return _started(code, "", lambda said: _is_literal(said, wanted))
    return _of_code(f"{setup}\n{assertion}")


def _of_code(code: str) -> Test:
    mark = secrets.token_hex()  # of a test that has been run to its end
    return _started(f"from solution import *\n{code}\nprint('\\n' + _given)", mark, mark.__eq__)


def _is_literal(text: str, value: object) -> bool:
    try:
        return bool(ast.literal_eval(text) == value)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _decoded(value: Any) -> Any:
    """JSON text as what it says; other values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
