"""docs/architecture.md's table of stages says what the @stage decorators say."""

import ast
import re
from pathlib import Path

import grpo_dist
from tests.sources import parsed

PACKAGE = Path(grpo_dist.__file__).parent
SOURCES = [PACKAGE / "trainer" / name for name in ("trainer.py", "loop.py")]
DOCUMENT = PACKAGE.parent / "docs" / "architecture.md"
HEADER = "| stage | method | needs | adds |"

# name, method, needed columns, added columns
Stage = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def stages_in_code(source: str | Path) -> list[Stage]:
    found: list[Stage] = []
    for node in ast.walk(parsed(source)):
        for decorator in node.decorator_list if isinstance(node, ast.AsyncFunctionDef) else ():
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "stage":
                keywords = [keyword for keyword in decorator.keywords if keyword.arg in ("needs", "adds")]
                columns = {keyword.arg: tuple(ast.literal_eval(keyword.value)) for keyword in keywords}
                assert isinstance(node, ast.AsyncFunctionDef)
                name = ast.literal_eval(decorator.args[0])
                found.append((name, node.name, columns.get("needs", ()), columns.get("adds", ())))
    return found


def stages_in_table(text: str) -> list[Stage]:
    """The rows of the table; cells name things in back quotes."""
    lines = text.partition(HEADER)[2].splitlines()[2:]  # the rest of the header's line, and the rule below it
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        stage, method, needs, adds = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in line.split("|")[1:5])
        rows.append((stage[0], method[0], needs, adds))
    return rows


def test_the_table_is_the_code() -> None:
    in_code = [stage for source in SOURCES for stage in stages_in_code(source)]
    assert len(in_code) >= 7
    assert stages_in_table(DOCUMENT.read_text()) == in_code


def test_the_columns_are_in_the_contract() -> None:
    from grpo_dist.protocol.fields import FIELDS

    for _, _, needs, adds in stages_in_code(SOURCES[0]):
        assert {*needs, *adds} <= FIELDS.keys()


def test_both_readers_see_a_difference() -> None:
    source = 'class T:\n    @stage("adv", needs=("a", "b"), adds=("c",))\n    async def advantages(self, batch): ...\n'
    table = f"{HEADER} what |\n|---|---|---|---|---|\n| `adv` | `advantages` | `a`, `b` | `c` | text |\n\nafter"
    assert stages_in_code(source) == stages_in_table(table) == [("adv", "advantages", ("a", "b"), ("c",))]
    assert stages_in_table(table.replace("`b`", "`d`")) != stages_in_code(source)
