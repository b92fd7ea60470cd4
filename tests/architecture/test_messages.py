"""Messages may be put in other words: tests check what they name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.messages import is_prose, says
from tests.sources import parsed

TESTS = Path(__file__).parents[1]


def texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield re.sub(r"\\(.)", r"\1", part.value)


def compared(node: ast.AST) -> list[ast.AST]:
    """What a message is compared with: a pattern of `match=`, or what an `in str(error)` looks for."""
    if isinstance(node, ast.keyword) and node.arg == "match":
        return [node.value]
    if isinstance(node, ast.Compare) and any(ast.unparse(side).startswith("str(") for side in node.comparators):
        return [node.left]
    return []


def sentences(source: str | Path) -> list[str]:
    found = (text for node in ast.walk(parsed(source)) for part in compared(node) for text in texts(part))
    return [text for text in found if is_prose(text)]


def test_no_test_rests_on_a_sentence() -> None:
    resting = {path: found for path in sorted(TESTS.rglob("test_*.py")) if (found := sentences(path))}
    assert resting == {}, "use refuses() and says() of tests/messages.py"


def test_sentences_are_found() -> None:
    raised = 'with pytest.raises(Error, match=r"k=1\\.5: must be .* than two"):\n    run()\n'
    assert sentences(raised) == []
    assert sentences(raised.replace("must", "it must")) == ["k=1.5: it must be .* than two"]
    assert sentences('assert f"{key} has no effect here" in str(caught.value)') == [" has no effect here"]
    assert sentences('assert "a list of lines" in lines') == []


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("must be positive", True),
        ("data.seed=3: must be positive", True),
        ("rollout.n to 2", False),
        ("1 or 2 or 3", False),
        ("json, schema and order", False),
        ("pip install -e '.[cpu]'", False),
        ("seed=3 is greater", False),
    ],
)
def test_prose(part: str, expected: bool) -> None:
    assert is_prose(part) == expected


def test_parts_are_whole_words_and_numbers() -> None:
    told = "rollout.n=16, temperature=0.25: set rollout.n to 2 or more"
    says(told, "rollout.n=16", "n=16", "0.25", "n to 2", "set")
    says(["another", told], "0.25", "more")
    for part in ("n=1", "25", "0", "mor", "ollout.n"):
        with pytest.raises(AssertionError, match="missing"):
            says(told, part)
    with pytest.raises(AssertionError, match="missing"):
        says(["one", "another"], "one", "another")
    for wrong in ((), ("set rollout.n to two or to many",)):
        with pytest.raises(AssertionError):
            says(told, *wrong)
