"""What README, tutorial and docs/clusters.md tell a new user: commands typed as they stand there, which GPUs fit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import fitting
from tests.messages import says
from tests.programs import program

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
README = (ROOT / "README.md").read_text()
CLUSTERS = (ROOT / "docs" / "clusters.md").read_text()


@pytest.fixture
def shell(tmp_path: Path):
    """Runs lines of a page in an empty folder, in which the commands are those of this package."""
    for name, arguments in (("grpo-dist", "-m grpo_dist"), ("python", "")):
        program(tmp_path / "bin" / name, f'exec "{sys.executable}" {arguments} "$@"')
    folder = tmp_path / "mine"
    folder.mkdir()
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(lines: str, code: int = 0) -> str:
        done = subprocess.run(
            ["bash", "-ec", lines], cwd=folder, env=os.environ | path, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.folder = folder  # type: ignore[attr-defined]
    return run


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.deep
def test_the_tutorial(shell) -> None:
    rows, rewards, script = blocks(TUTORIAL, "python")
    make_rows, check, check_wrong, train = blocks(TUTORIAL, "bash")
    for name, text in (("make_rows", rows), ("rewards", rewards), ("script", script)):
        (shell.folder / f"{name}.py").write_text(text)
    shell(make_rows)
    assert [len((shell.folder / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "test")] == [400, 40]
    told = shell(check)
    says(told, "correct=1", "3 scored", "0 failed")
    says(shell(check_wrong), "correct=0", "score", "-0.014")
    told = shell(train.rstrip() + " trainer.dry_run=true")
    says(told, "16 prompts * n=8 = 128", "400 for training", "40 for validation", "training steps: 20")
    says(told, "data.prompt_key=question", "data.answer_key=answer")
    compile(script, "tutorial", "exec")


@pytest.mark.deep
def test_the_readme(shell) -> None:
    (block,) = [each for each in blocks(README, "bash") if "check-env" in each]
    lines = block.replace(". .venv/bin/activate\n", "").replace("FOLDER_OR_HUB_NAME", "builtin:tiny-qwen3")
    lines = lines.replace("grpo-dist rehearse", "grpo-dist train")
    told = shell(lines.replace("cluster=cpu", "cluster=cpu trainer.dry_run=config"))
    says(told, "right=1", "2 scored", "0 failed")
    says(told, "2 prompts * n=8 = 16")
    says(told, "rewards.py:right", "rewards.py:short")


# --- the table of models and GPUs ------------------------------------------------------------------------------------
def cells(model: str) -> list[str]:
    (row,) = [line for line in CLUSTERS.splitlines() if line.startswith(f"| {model} |")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_some_cells_of_the_page_are_the_plans() -> None:
    columns = [(gpu, kind) for kind in fitting.KINDS for gpu in fitting.GPUS]
    for model, gpu, kind in (
        ("Qwen3-0.6B", "24 GB", "all weights"),
        ("Qwen3-8B", "80 GB", "all weights"),
        ("Qwen3-1.7B", "24 GB", "8-bit states"),
    ):
        assert cells(model)[columns.index((gpu, kind))] == fitting.fewest(model, fitting.GPUS[gpu], kind)


@pytest.mark.long
def test_the_table_is_fresh() -> None:
    assert fitting.table() in CLUSTERS, "run: python scripts/fitting.py, and put it into docs/clusters.md"
