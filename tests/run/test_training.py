"""Which losses a run is started again after, from where, and how it ends when Ray hangs."""

import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from grpo_dist.checks.all_checks import Ready
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError, DataLost, OutOfMemory, Terminated, WorkerLost
from grpo_dist.plan.commands import load_config
from grpo_dist.run import training
from grpo_dist.trainer.preemption import Preemption
from tests.messages import says

NOTHING = Ready(None, 1, [])  # what a start takes from the checks
LOST = WorkerLost("its process died", "actor", 0)


def trainer(error: Exception | None = None, last: Path | None = None) -> Any:
    """A trainer with this last checkpoint, which trains, or fails."""
    made = Mock(step=0, roles=Mock(workers=[]), saver=Mock(last=last, holders=lambda: {"actor"}))
    made.fit.side_effect = error
    return made


def starts_of(starts: list[Any], *overrides: str, preemption: Preemption | None = None) -> list[Any]:
    """Train with what each start gives, a trainer or an error; returns the arguments of each start."""
    start_run = Mock(side_effect=starts)
    with patch.multiple(training, start_run=start_run, peak_memory=lambda groups: {}):
        training._train(load_config(list(overrides))[0], Path(), preemption or Preemption(), NOTHING, None)
    return [call.args for call in start_run.call_args_list]


def train(starts: list[Any], *overrides: str) -> list[RunConfig]:
    """The config of each start."""
    return [config for config, *_ in starts_of(starts, *overrides)]


def test_a_loss_is_made_good_from_the_last_checkpoint_also_in_a_restart_and_not_for_ever(tmp_path: Path) -> None:
    """Of a worker with state of the run, or of data that were in the memory of a lost machine."""
    last, gone = tmp_path / "elsewhere/global_step_3", DataLost("what it needs was in the memory of a lost machine")
    for error in (LOST, gone):
        seen = train([trainer(error, last), LOST, trainer()])
        assert [config.trainer.resume_from_path for config in seen] == [None, str(last), str(last)]
        with pytest.raises(type(error)):
            train([trainer(error)] * 2, "trainer.max_actor_restarts=1")
    for never in (LOST, trainer(WorkerLost("its process died", "ref", 0))):  # the first start; no state
        with pytest.raises(WorkerLost):
            train([never, trainer()])


def test_what_a_restart_lacks_is_no_fault_of_the_config() -> None:
    """Exit code 2 would tell a scheduler not to try again: a machine that is gone comes back."""
    for starts, code in (([trainer(LOST), ConfigError("no room")], 1), ([ConfigError("no room")], 2)):
        with pytest.raises(ConfigError) as caught:
            train(starts)
        assert caught.value.exit_code == code


def test_only_a_restart_waits_for_room() -> None:
    """At its first start a run asks for too much; later a machine may be missing."""
    starts = starts_of([trainer(LOST), trainer(LOST), trainer()])
    assert [ready.again for *_, ready in starts] == [False, True, True]


def test_it_goes_on_from_the_last_checkpoint_or_if_that_is_damaged_from_the_one_before(tmp_path: Path) -> None:
    last = tmp_path / "global_step_4"
    last.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    override = f"trainer.default_local_dir={tmp_path}"
    seen = train([trainer(LOST, last), trainer()], override)
    assert (seen[1].trainer.resume_mode, seen[1].trainer.resume_from_path) == ("force", None)
    seen = train([trainer(LOST), trainer()], override)
    assert seen[1].trainer.resume_mode == "disable", "what lies there is not of this run"


MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
FULL = OutOfMemory("the memory of the GPU is not enough", "actor", 3, remedy="lower it", setting=(MICRO_BATCH, 64))


def test_a_gpu_that_is_full_ends_the_run_unless_smaller_passes_are_allowed(tmp_path: Path) -> None:
    allowed = "trainer.halve_on_out_of_memory=true"
    with pytest.raises(OutOfMemory):
        train([trainer(FULL), trainer()])
    last = tmp_path / "elsewhere/global_step_3"
    seen = train([trainer(FULL, last), trainer(LOST, last), trainer()], allowed)
    assert [config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu for config in seen] == [64, 32, 32]
    assert [config.trainer.resume_from_path for config in seen] == [None, str(last), str(last)]
    with pytest.raises(OutOfMemory):
        train([trainer(FULL)] * 2, allowed, "trainer.max_actor_restarts=1")
    nothing_smaller = OutOfMemory("the memory of the GPU is not enough", "actor", 3, remedy="take more GPUs")
    with pytest.raises(OutOfMemory):
        train([trainer(nothing_smaller), trainer()], allowed)


def test_a_run_that_is_told_to_end_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM came in the update, and then an actor rank was lost."""

    def fit() -> None:
        preemption.held = True
        preemption.handle(signal.SIGTERM, None)
        raise LOST

    preemption, made = Preemption(), trainer()
    made.fit.side_effect = fit
    with pytest.raises(Terminated):
        starts_of([made], preemption=preemption)
    assert not preemption.held
    says(capsys.readouterr().err, "SIGTERM", "no checkpoint", "actor worker 0")


# --- half of a setting, where half of it is legal ---------------------------------------------------------------------
def test_a_micro_batch_down_to_one_sequence() -> None:
    config, _ = load_config([f"{MICRO_BATCH}=3"])
    smaller = training.halved(config, (MICRO_BATCH, 3))
    assert smaller is not None
    assert smaller.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 1
    assert smaller.actor_rollout_ref.rollout == config.actor_rollout_ref.rollout
    assert training.halved(smaller, (MICRO_BATCH, 1)) is None
    assert training.halved(config, None) is None


@pytest.mark.parametrize("role", ["rollout", "ref"])
def test_a_budget_that_is_inherited_and_down_to_the_longest_sequence(role: str) -> None:
    """Which has 100 tokens."""
    actor, lengths = "actor_rollout_ref.actor", ("data.max_prompt_length=60", "data.max_response_length=40")
    budgets = (f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_max_token_len_per_gpu=250")
    config, key = load_config([*lengths, *budgets])[0], f"actor_rollout_ref.{role}.log_prob_max_token_len_per_gpu"
    smaller = training.halved(config, (key, 250))
    assert smaller is not None
    assert getattr(smaller.actor_rollout_ref, role).log_prob_max_token_len_per_gpu == 125
    assert smaller.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 250
    assert training.halved(smaller, (key, 125)) is None


# --- the end --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ends_with", ["the local cluster's processes", "this process"])
def test_a_ray_that_hangs_holds_nobody_up_at_the_end(ends_with: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are killed, which are none in a cluster of others; then this one ends, and says how the run did."""
    gone, did = threading.Event(), list[Any]()

    def kill_ray() -> None:
        did.append("killed")
        if ends_with == "the local cluster's processes":
            gone.set()

    def force(*what: Any) -> None:
        did.append(what)
        gone.set()

    monkeypatch.setattr(training, "DISCONNECT_S", 0.05)
    monkeypatch.setattr(training, "kill_ray", kill_ray)
    monkeypatch.setattr("ray.shutdown", gone.wait)
    stack, ignore = ExitStack(), SimpleNamespace(ignore=lambda: did.append("ignores signals"))
    stack.callback(training._disconnect, ignore, force)
    with pytest.raises(WorkerLost), stack:
        raise LOST
    forced = [] if ends_with == "the local cluster's processes" else [("the Ray cluster", LOST)]
    assert did == ["ignores signals", "killed", *forced]


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
def test_an_end_by_force_tells_what_a_run_tells_and_has_its_exit_code(
    number: signal.Signals | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "global_step_4").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    codes, told = list[int](), list[Any]()
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr(training, "kill_ray", lambda: None)
    preemption = Preemption()
    preemption.number = number
    training._end_by_force(tmp_path, preemption, told.append, "raylet", LOST)
    (error,) = told
    assert codes == [3 if number is None else 128 + number]
    assert error.checkpoint == tmp_path / "global_step_4"
    if number is None:
        says("\n".join([str(error), *error.__notes__]), "raylet", "ray_kwargs.ray_init.address", "actor worker 0")
    else:
        says(error, number.name)
        says(capsys.readouterr().err, number.name, "raylet")
