"""What users build on: the packages' public names, their docstrings, and the recipes of docs/extending.md."""

import ast
import asyncio
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import grpo_dist
from tests.sources import parsed

PACKAGE = Path(grpo_dist.__file__).parent
DOCS = PACKAGE.parent / "docs"
EXTENDING = DOCS / "extending.md"

# A name that leaves this list is a breaking change and belongs in CHANGELOG.md.
PUBLIC = {
    "grpo_dist": {"TrainingResult", "__version__", "train"},
    "grpo_dist.algorithms": {
        *("agg_loss", "compute_advantage", "compute_policy_loss", "compute_rollout_correction", "compute_value_loss"),
        *("kl_penalty", "policy_objective"),
    },
    "grpo_dist.agents": {
        *("AgentLoop", "Episode", "External", "Row", "SingleTurn", "ToolAgent", "Turn", "load_agent_loop"),
    },
    "grpo_dist.protocol": {"DataProto", "Max", "Mean", "Metric", "Ragged", "Sum", "merge_metrics", "metric_values"},
    "grpo_dist.data": {
        *("Prompt", "PromptSampler", "TokenizedPrompt", "load_prompts", "load_tokenizer", "read_rows"),
        "tokenize_prompts",
    },
    "grpo_dist.sandbox": {"Outcome", "Sandbox", "SandboxSettings", "check", "open_sandbox"},
    "grpo_dist.rewards": {
        *("RewardFunction", "RewardResult", "check_data_sources", "load_reward_function", "score_response"),
    },
}


def undocumented(source: str | Path) -> Iterator[str]:
    """Public functions, classes and methods without a docstring; what is private or magic need not have one."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name[0] == "_":
                continue
            if not ast.get_docstring(node):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")

    yield from visit(parsed(source).body, "")


def test_modules_and_public_things_have_docstrings() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert {path: found for path in paths if (found := list(undocumented(path)))} == {}
    assert [path for path in paths if path.name != "__init__.py" and not ast.get_docstring(parsed(path))] == []


def test_a_missing_docstring_is_found() -> None:
    source = 'def _f(): ...\nclass A:\n    """A."""\n    def g(self): ...\n    def __len__(self): ...\ndef h(): ...\n'
    assert list(undocumented(source)) == ["A.g", "h"]


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("number", range(len(python_blocks(EXTENDING.read_text()))))
def test_recipes_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_blocks(EXTENDING.read_text())[number], f"{EXTENDING}, block {number}", "exec"), {})


def test_recipe_functions_work_by_name(tmp_path: Path) -> None:
    import torch

    from grpo_dist.algorithms import compute_advantage, kl_penalty

    estimator, kl = (next(b for b in python_blocks(EXTENDING.read_text()) if f"def {name}(" in b) for name in NAMES)
    (tmp_path / "estimator.py").write_text(estimator)
    (tmp_path / "kl.py").write_text(kl)
    batch = {"token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 2.0]]), "index": ["a"] * 3}
    batch["response_mask"] = torch.tensor([[1, 1], [1, 0], [1, 1]])
    advantages, _ = compute_advantage(f"{tmp_path}/estimator.py:{NAMES[0]}", **batch)
    assert advantages.tolist() == [[0.0, 0.0], [-1.0, 0.0], [1.0, 1.0]]
    p, q = torch.tensor([[0.0, -1.0]]), torch.tensor([[-0.5, 0.0]])
    assert kl_penalty(f"{tmp_path}/kl.py:{NAMES[1]}", p, q).tolist() == [[0.5, 1.0]]


NAMES = ("median_baseline", "absolute")


def test_the_recipe_of_a_rollout_engine_samples_for_a_worker(tmp_path: Path) -> None:
    from grpo_dist.checks.own_code import resolve_names
    from grpo_dist.engines.settings import SamplingSettings
    from grpo_dist.plan.commands import load_config
    from grpo_dist.plan.plan import make_plan
    from grpo_dist.workers.rollout import RolloutWorker

    (tmp_path / "engine.py").write_text(next(b for b in python_blocks(EXTENDING.read_text()) if "RepeatEngine" in b))
    config, _ = load_config([f"actor_rollout_ref.rollout.name={tmp_path}/engine.py:RepeatEngine"])
    resolve_names(config)

    async def sample() -> Any:
        worker = RolloutWorker()
        await worker.start(make_plan(config).engine(0))
        await worker.load_weights([], 4)
        return (await worker.generate("p", np.array([7, 8], np.int32), SamplingSettings(2, 1.0, 1.0, -1, 3, 0)))[1]

    data = asyncio.run(sample())
    assert [row.tolist() for row in data["responses"].rows()] == [[8, 8, 8]] * 2
    assert data["weight_version"].tolist() == [4, 4]


def test_documents_name_files_that_exist() -> None:
    named = re.compile(r"`((?:grpo_dist|tests|examples|scripts)/[\w./-]+\.(?:py|yaml|sh|md))`")
    for document in (DOCS / "architecture.md", EXTENDING):
        for name in named.findall(document.read_text()):
            assert (PACKAGE.parent / name).is_file(), f"{document.name} names {name}"
