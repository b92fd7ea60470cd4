"""What the commands that train have in common: --help, dry runs, and how errors end."""

import pickle
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist import errors, main
from grpo_dist.errors import ConfigError, GrpoDistError, Interrupted, RayLost, Terminated, WorkerError
from grpo_dist.main import reward_model, sft
from grpo_dist.plan.commands import REWARD_MODEL
from grpo_dist.run import run as run_module
from grpo_dist.terminal import as_typed
from tests.messages import says

COMMANDS = pytest.mark.parametrize("command", [main.main, reward_model, sft], ids=["main", "reward_model", "sft"])
Main = Callable[[list[str]], int]


@pytest.mark.parametrize(("command", "name"), [(main.main, "train"), (reward_model, "reward-model"), (sft, "sft")])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_says_how_it_is_called(command: Main, name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([flag, "nonsense"]) == 0
    out = capsys.readouterr().out
    says(out, f"grpo-dist {name}", "* model=tiny", "* data=arithmetic", "data=files")
    assert ".yaml" in out


@COMMANDS
def test_a_mistake_is_told_with_its_key_and_exit_code_2(command: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["trainer.sed=3", "data.train_batch_size=0"]) == 2
    shown = capsys.readouterr()
    says(shown.err, "trainer.sed:", "trainer.seed", "data.train_batch_size=0")
    assert (shown.out, "Traceback" in shown.err) == ("", False)


@COMMANDS
def test_a_dry_run_of_the_config_checks_nothing_here(command: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["trainer.dry_run=config", "data.val_files=gone.jsonl"]) == 0
    out = capsys.readouterr().out
    says(out, "gone.jsonl")
    assert "checked on this machine" not in out
    if command is main.main:
        elsewhere = ["model=qwen3_8b", "data=gsm8k", "cluster=node8", "custom_reward_function.path=gone.py"]
        assert command([*elsewhere, "trainer.dry_run=config"]) == 0
        says(capsys.readouterr().out, "custom_reward_function.path=gone.py:")


def test_keys_of_roles_that_a_run_lacks_and_of_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ["actor_rollout_ref.actor.optim.lr=0.001", "trainer.dry_run=config"]
    assert main.main([*shown, "critic.optim.lr=0.01"]) == 0
    out = capsys.readouterr().out
    says(out, shown[0])
    assert "critic." not in out
    assert main.main([*shown, "critic.optim.lr=0.01", "recipe=ppo"]) == 0
    says(capsys.readouterr().out, "critic.optim.lr=0.01")
    assert reward_model(["actor_rollout_ref.rollout.n=8", "model.lora_rank=8"]) == 2
    says(capsys.readouterr().err, "actor_rollout_ref.rollout.n:", "model.lora_rank:")
    assert main.main(["optim.clip_grad=1"]) == 2
    says(capsys.readouterr().err, "optim.clip_grad:")


# --- endings -------------------------------------------------------------------------------------------------------
def ends(error: BaseException | None, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """The exit code of a run that ends so."""

    def run(config: Any, on_forced_end: Any) -> None:
        assert isinstance(config, REWARD_MODEL.schema)
        if isinstance(error, RayLost):
            on_forced_end(error)
        if error is not None:
            raise error

    monkeypatch.setattr(run_module, "run", run)
    for name in ("plan", "summary"):
        monkeypatch.setattr(main, f"format_{name}", lambda config, notes, *changed, name=name: name)
    return main.run_command(REWARD_MODEL, [*overrides])


@pytest.mark.parametrize("quiet", ["--quiet", "trainer.console=false"])
def test_a_quiet_run_shows_nothing_but_errors(
    quiet: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(None, monkeypatch) == 0
    assert capsys.readouterr() == ("summary\n", ""), "what another one begins with"
    assert ends(None, monkeypatch, quiet) == 0
    assert capsys.readouterr() == ("", "")
    assert ends(GrpoDistError("a=1"), monkeypatch, quiet) == 1
    says(capsys.readouterr().err, "a=1")
    assert ends(None, monkeypatch, quiet, "trainer.dry_run=config") == 0
    assert capsys.readouterr().out == "plan\n", "that is what a dry run is for"


EXIT_CODES = {"ConfigError": 2, "DataError": 2, "RayLost": 3}  # 2: what the user can mend


def test_errors_and_their_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    endings = [ConfigError("a=1"), GrpoDistError("a=1"), RayLost("a=1"), KeyboardInterrupt()]
    assert [ends(error, monkeypatch) for error in endings] == [2, 1, 3, 128 + signal.SIGINT]
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, GrpoDistError)]
    assert {each.__name__: each.exit_code for each in found if each.exit_code != 1} == EXIT_CODES
    assert issubclass(errors.BatchError, ValueError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("kind", [Interrupted, Terminated])
def test_a_run_that_was_stopped_names_its_checkpoint_and_the_command_that_goes_on(
    kind: type[Interrupted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped, code = kind(), 128 + (signal.SIGTERM if kind is Terminated else signal.SIGINT)
    stopped.checkpoint = tmp_path / "my run/global_step_4"
    given = [f"trainer.default_local_dir={tmp_path}/my run", "optim.betas=[0.8,0.9]"]
    begun = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}"]  # stopped before its first step
    for overrides, taken in (([*given, "trainer.resume_mode=disable"], given), (begun, begun)):
        assert ends(stopped, monkeypatch, *overrides) == code
        told = capsys.readouterr().err
        says(told, stopped.checkpoint)
        command = shlex.split(told.partition("to go on:")[2])
        assert command == [as_typed("grpo-dist"), "reward-model", *taken], "disable would start anew"
    assert ends(kind(), monkeypatch) == code
    told = capsys.readouterr().err
    says(told, "SIGTERM" if kind is Terminated else "SIGINT")
    assert "reward-model" not in told, "there is no checkpoint"


def test_where_ray_was_lost_the_command_is_named_also_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, folder = RayLost("gcs_server at 127.0.0.1:6379"), f"trainer.default_local_dir={tmp_path}"
    for lost.checkpoint in (None, tmp_path / "global_step_4"):
        ends(lost, monkeypatch, folder)
        told = capsys.readouterr().err
        says(told, "gcs_server at 127.0.0.1:6379", "grpo-dist reward-model", folder)
        assert (str(tmp_path / "global_step_4") in told) == (lost.checkpoint is not None)


def test_a_workers_traceback_and_notes_are_shown_and_the_drivers_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = WorkerError("it broke", "reward_model", 1, remote_traceback="Traceback: rank.py")
    error.add_note("in stage 'train' of step 3")
    assert ends(error, monkeypatch) == 1
    told = capsys.readouterr().err
    says(told, "reward_model worker 1", "'train'", "step 3", "Traceback: rank.py")
    assert "grpo_dist/main.py" not in told


def test_worker_error_survives_the_way_between_processes() -> None:
    error = WorkerError("it broke", "actor", 3, "host7", "update", "Traceback ...")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy)) == (WorkerError, vars(error))
    assert str(copy) == "actor worker 3 on host7, stage 'update': it broke"
    assert str(WorkerError("it broke")) == "? worker -1 on ?, stage '?': it broke"
