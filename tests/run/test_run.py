"""What a run refuses and shows before Ray starts. The rest of a run: tests/e2e/test_main_job.py."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from grpo_dist import main
from grpo_dist.config.command import AnyCommand
from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.main import reward_model, sft
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT, load_config
from grpo_dist.run import run
from tests.messages import says
from tests.trainer.checkpoints import finished_run


def test_the_summary_shows_the_flag_that_its_commands_need(tmp_path: Path) -> None:
    """A function of the package needs none; one of the run's own, `eval`; arguments of the engine, both. Without rows
    to validate on there is nothing that `eval` could ask.
    """
    (tmp_path / "reward.py").write_text("def compute_score(**row):\n    return 0.0\n")
    own = f"custom_reward_function.path={tmp_path}/reward.py"
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32"
    needed = {(): [], (own,): ["eval"], (engine,): ["eval", "generate", "serve"]}
    for overrides, commands in needed.items():
        expected = {"generate": "", "serve": "", "eval": ""} | dict.fromkeys(commands, " --trust-run-code")
        assert run._flags(load_config([*overrides])[0]) == expected
    assert run._flags(load_config(["data.val_files=null", "trainer.test_freq=-1"])[0]) == {"generate": "", "serve": ""}
    assert run._flags(load_command([], SFT)[0]) == {}


@pytest.mark.deep
def test_a_model_with_a_float32_output_layer_is_built_before_ray_starts(tmp_path: Path) -> None:
    """As one with LoRA's factors is: it may not take it."""
    bf16 = [f"actor_rollout_ref.{role}.fsdp_config.dtype=bf16" for role in ("actor", "ref")]
    head, folder = "actor_rollout_ref.model.head_dtype=fp32", f"trainer.default_local_dir={tmp_path}/run"
    config, _ = load_config([head, folder, *bf16])
    with patch.object(run, "build_models", side_effect=ConfigError("refused")) as build, pytest.raises(ConfigError):
        run.run(config)
    assert "actor_rollout_ref.model.path" in [row.model.key for row in build.call_args.args[0]]


# --- sessions: a command typed again, or another one, where a run has finished ----------------------------------------
@pytest.mark.parametrize(
    ("main", "command", "other"),
    [
        pytest.param(main.main, GRPO, "recipe=dr_grpo", id="main"),
        pytest.param(sft, SFT, "optim.lr=0.5", id="sft", marks=pytest.mark.deep),
        pytest.param(reward_model, REWARD_MODEL, "optim.lr=0.5", id="reward_model", marks=pytest.mark.deep),
    ],
)
def test_the_same_command_again_and_another_experiment(
    main: Any, command: AnyCommand, other: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "prepare", lambda *args: pytest.fail("Ray was started"))
    given = ["trainer.total_training_steps=3", f"trainer.default_local_dir={tmp_path}/run"]
    finished_run(load_command(given, command)[0], 3)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert main(given) == 0
    told = capsys.readouterr().out
    says(told, "step 3 of 3", tmp_path / "run/huggingface", "trainer.total_training_steps", "default_local_dir")
    assert main([*given, other]) == 2
    told = capsys.readouterr()
    says(told.err, tmp_path / "run/global_step_3", "trainer.default_local_dir", "trainer.resume_mode=force", "->")
    assert "huggingface" not in told.out, "the model is another experiment's"
    assert main([*given, other, "trainer.resume_mode=force"]) == 2
    says(capsys.readouterr().err, "step 3 of 3", "trainer.total_training_steps")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before, "nothing is touched"
