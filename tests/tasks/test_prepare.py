"""The command line, and the built-in task through it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.tasks import arithmetic
from grpo_dist.tasks.prepare import main
from tests.messages import says
from tests.tasks.conftest import prompts_of


def test_arithmetic_files_equal_the_built_in_task(tmp_path: Path) -> None:
    assert main(["arithmetic", "--local_save_dir", str(tmp_path)]) == 0
    for split in ("train", "validation"):
        prompts = prompts_of(tmp_path / f"{split}.parquet")
        from_file = [(p.messages, p.ground_truth) for p in prompts]
        assert from_file == [(r["prompt"], r["reward_model"]["ground_truth"]) for r in arithmetic.rows(split)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["TASK"]),
        (["gsm9k", "--local_save_dir", "x"], ["'gsm9k'"]),
        (["math"], ["--local_save_dir"]),
        (["countdown", "--local_save_dir", "x", "--train_size", "many"], ["--train_size", "'many'"]),
        (["arithmetic", "--local_save_dir", "x", "--seed", "1"], ["--seed 1"]),
    ],
)
def test_wrong_arguments(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    says(capsys.readouterr().err, *words)


def test_a_task_that_has_moved_says_what_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["planner", "--local_save_dir", "x"]) == 2
    says(capsys.readouterr().err, "planner", "python examples/planner/planner_rows.py --local_save_dir x")


@pytest.mark.parametrize("module", [["grpo_dist", "data"], ["grpo_dist.tasks.prepare"]])
def test_as_a_module(module: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", *module, "countdown", "--local_save_dir", str(tmp_path)]
    done = subprocess.run([*command, "--train_size=3", "--test_size=2"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/train.parquet: 3 rows\n{tmp_path}/test.parquet: 2 rows\n"
