import subprocess
import sys

import pytest

from grpo_dist.main import main
from tests.messages import says

MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def test_help(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    assert "model=" in capsys.readouterr().out


def test_dry_run_starts_nothing(capsys: pytest.CaptureFixture) -> None:
    assert main(["trainer.dry_run=true"]) == 0
    assert "32 prompts * n=8" in capsys.readouterr().out


def test_a_typo_is_answered_with_the_key_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_dist.main", "algorithm.adv_estimater=grpo"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "algorithm.adv_estimator" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_of_the_config_asks_nothing_of_this_machine(capsys: pytest.CaptureFixture) -> None:
    elsewhere = ["model=qwen3_8b", "data=gsm8k", "cluster=node8", "custom_reward_function.path=gone.py"]
    assert main([*elsewhere, "trainer.dry_run=config"]) == 0
    shown = capsys.readouterr().out
    says(shown, "custom_reward_function.path=gone.py:")  # said as a note
    assert "this machine" not in shown


def test_impossible_batch_arithmetic_names_the_keys(capsys: pytest.CaptureFixture) -> None:
    assert main(["data.train_batch_size=30", f"{MINI}=32", "trainer.dry_run=true"]) == 2
    err = capsys.readouterr().err
    assert "data.train_batch_size" in err
    assert "ppo_mini_batch_size" in err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture) -> None:
    assert main(["data.train_files=nowhere.parquet"]) == 2
    assert "nowhere.parquet" in capsys.readouterr().err
