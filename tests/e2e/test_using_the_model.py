"""After training: the commands that use a model, on a run of the main job."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.cli.entry import main
from grpo_dist.protocol import Ragged
from grpo_dist.protocol.parquet import read_parquet, write_parquet
from tests.chaos.runs import STEPS, Outcome
from tests.messages import says

pytestmark = [pytest.mark.ray, pytest.mark.deep]

ACCURACY = "val-core/arithmetic/acc/mean@1"


def test_eval_gives_the_figures_that_the_run_gave(main_run: Outcome) -> None:
    """The run has validated its first and its last policy; the base model is its first."""
    command = [sys.executable, "-m", "grpo_dist", "eval", str(main_run.run_dir), "--base", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    base, trained = json.loads(told.stdout)
    assert [row["model"] for row in (base, trained)] == ["base builtin:tiny-qwen3", f"run step {STEPS}"]
    measured = dict(main_run.curve(ACCURACY))
    assert base["acc mean@1"][0] == pytest.approx(measured[0], abs=1e-6)
    assert trained["acc mean@1"][0] == pytest.approx(measured[STEPS], abs=1e-6)
    assert base["prompts"] == 16


def test_steps_of_a_run_are_computed_again(main_run: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    """The first, by the model's own weights, and a later one by those of a checkpoint: two optimizer steps each."""
    for step in (1, STEPS):
        assert main(["replay", str(main_run.run_dir), str(step), "--update"]) == 0
        row = next(row for row in main_run.metrics() if row["step"] == step)
        told = capsys.readouterr().out
        says(told, "old_log_probs", "advantages", f"actor/grad_norm {row['actor/grad_norm']:.4g}")


def test_the_first_number_that_differs_is_named_and_what_cannot_be_replayed(
    main_run: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollouts").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "rollouts/2.parquet"):  # what a replay without an update needs
        shutil.copy(main_run.run_dir / name, tmp_path / name)
    path = tmp_path / "rollouts" / "2.parquet"
    assert main(["replay", str(tmp_path), "5"]) == 2
    says(capsys.readouterr().err, "step 5", tmp_path / "rollouts" / "5.parquet", 2)
    assert main(["replay", str(tmp_path), "2", "--update"]) == 2
    says(capsys.readouterr().err, "step 2", "trainer.save_freq")
    assert main(["replay", str(tmp_path), "2"]) == 0, "rewards and advantages are as they were"
    says(capsys.readouterr().out, "update", "trainer.save_freq")
    second = int(read_parquet(path)["responses"].lengths[0])  # where the second response begins
    for name, place, told in (("score", 1, []), ("advantages", second + 2, ["token 2"])):
        data = read_parquet(main_run.run_dir / "rollouts" / "2.parquet")
        column = data[name]
        (column.values if isinstance(column, Ragged) else column)[place] = 17.0
        write_parquet(data, path)
        assert main(["replay", str(tmp_path), "2"]) == 1
        says(capsys.readouterr().out, name, 17, f"response 1 ({data['uid'][1]})", *told)
