"""Where tests are, and how large files and functions may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_dist

PACKAGE = Path(grpo_dist.__file__).parent
ROOT = PACKAGE.parent
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 80

# Modules without a test file of their own -> the file that tests them. All of them are one step of something larger,
# and are tested where a user meets them.
ADVANTAGE_FILES = ("inputs", "outcome")
POLICY_LOSS_FILES = ("clipped", "covariance", "inputs", "unclipped")
TESTED_ELSEWHERE = {
    "trainer/agreement.py": "cli/test_agreement.py",  # with real engines
    "engines/vllm/watching.py": "cli/test_agreement.py",  # runs inside vLLM only
    "cli/replay.py": "e2e/test_using_the_model.py",  # on the step of a run
    "trainer/loop.py": "trainer/test_trainer.py",  # what the update gets
    # one test file for each door
    **{f"algorithms/advantage/{name}.py": "algorithms/test_advantage.py" for name in ADVANTAGE_FILES},
    **{f"algorithms/policy_loss/{name}.py": "algorithms/test_policy_loss.py" for name in POLICY_LOSS_FILES},
    "__main__.py": "cli/test_entry.py",  # the same command
    "cli/asking.py": "cli/test_generate.py",  # what both ask with
    "cli/arguments.py": "cli/test_entry.py",  # every command explains itself
    "trainer/model_usage.py": "cli/test_trained.py",  # read there
    "agents/child_loop.py": "agents/test_external.py",  # what runs beside a rollout engine
    "trainer/checkpoint/export.py": "cli/test_export.py",  # by its command
    "config/field_types.py": "config/test_schema.py",  # the types of the schema
    "config/keys.py": "config/test_load.py",  # hints in messages
    "sizes.py": "plan/test_memory.py",  # counted with there
    "plan/commands.py": "config/test_load.py",  # the commands whose configs are loaded there
    "plan/key_rules.py": "plan/test_rules.py",  # most of the rules there
    "config/schema_roles.py": "config/test_schema.py",  # a part of the schema
    "config/schema_models.py": "plan/test_rules.py",  # a part of the schema
    "config/schema_health.py": "trainer/test_health.py",  # the rules that are judged there
    "plan/model_shape.py": "plan/test_plan.py",  # sizes that the dry run counts with
    "plan/role_models.py": "plan/test_roles.py",  # what the rows of the table say of models
    "config/overrides.py": "config/test_load.py",  # the command line
    "checks/result.py": "checks/test_run_folder.py",  # plain records
    "config/problems.py": "config/test_load.py",  # wording of messages
    "algorithms/settings.py": "trainer/test_loss_settings.py",  # plain records, made there
    "engines/settings.py": "engines/train/test_fsdp_engine.py",  # plain records
    "engines/train/sharded_tensors.py": "engines/train/test_lora.py",  # one line, which gathers merged weights
    "engines/vllm/starting.py": "engines/vllm/test_engine.py",  # likewise
    "engines/vllm/weight_backend.py": "engines/vllm/test_engine.py",  # runs inside vLLM only
    "tracking/metric_names.py": "tracking/test_summary.py",  # metric names
    "run/build.py": "e2e/test_main_job.py",  # started workers
    "trainer/checkpoint/finished_groups.py": "trainer/test_staleness.py",  # by a run that samples ahead
    "trainer/rollout/job.py": "trainer/test_trainer.py",  # every rollout there goes through it
    "runtime/resources.py": "runtime/test_group.py",  # placement group
}

PYTHON_FILES = sorted(
    path
    for folder in ("grpo_dist", "tests", "scripts", "examples", "benchmarks", "conformance")
    for path in (ROOT / folder).rglob("*.py")
)


def modules() -> list[str]:
    """Modules with code of their own, relative to the package."""
    paths = (path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return sorted(str(path.relative_to(PACKAGE)) for path in paths)


def mirrored_test(module: str) -> str:
    folder, _, name = module.rpartition("/")
    return f"{folder}/test_{name}" if folder else f"test_{name}"


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of the functions that are too long, decorators not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                yield node.name, lines


@pytest.mark.parametrize("module", modules())
def test_every_module_has_a_test_file(module: str) -> None:
    expected = TESTED_ELSEWHERE.get(module, mirrored_test(module))
    path = ROOT / "tests" / expected
    assert path.is_file(), f"{module} needs tests/{expected}"
    assert "def test_" in path.read_text(), f"tests/{expected} tests nothing"


def test_the_exceptions_name_modules_that_exist() -> None:
    assert TESTED_ELSEWHERE.keys() <= set(modules())


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MOST_FILE_LINES
    assert list(long_functions(source)) == []


def test_long_functions_are_found_wherever_they_are() -> None:
    body = "\n".join(["        pass"] * MOST_FUNCTION_LINES)
    source = f"class A:\n    async def f(self):\n{body}\n\n    def g(self):\n        pass\n"
    assert list(long_functions(source)) == [("f", MOST_FUNCTION_LINES + 1)]


def test_no_catch_all_modules() -> None:
    names = {path.stem for path in PYTHON_FILES}
    assert names.isdisjoint({"utils", "util", "helpers", "misc", "common"})
