"""SIGTERM: when it waits, what is saved, and what is not."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.errors import Terminated, WorkerLost
from grpo_dist.trainer import run
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.trainer import GRPOTrainer
from grpo_dist.workers.group import WorkerGroup
from tests.trainer.fake_run import make_trainer


def test_it_ends_the_run_at_once_where_the_state_is_a_finished_steps() -> None:
    preemption = Preemption()
    with pytest.raises(Terminated):
        preemption.handle(signal.SIGTERM, None)
    assert preemption.asked


def test_it_waits_for_the_end_of_a_step_whose_update_has_begun() -> None:
    preemption = Preemption()
    preemption.hold()
    preemption.handle(signal.SIGTERM, None)
    assert preemption.asked
    with pytest.raises(Terminated):
        preemption.release()


def test_the_second_one_does_not_wait() -> None:
    preemption = Preemption()
    preemption.hold()
    preemption.handle(signal.SIGTERM, None)
    with pytest.raises(Terminated):
        preemption.handle(signal.SIGTERM, None)


def test_without_it_nothing_happens() -> None:
    preemption = Preemption()
    for _ in range(2):
        preemption.hold()
        preemption.release()
    assert not preemption.asked


def terminated_in(trainer: GRPOTrainer, method: str, *, step: int, times: int) -> None:
    """Run until SIGTERM comes `times` times at the end of `method` in a step."""
    original = getattr(trainer, method)

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if trainer.step + 1 == step:
            for _ in range(times):
                trainer.preemption.handle(signal.SIGTERM, None)
        return result

    setattr(trainer, method, interrupted)
    with pytest.raises(Terminated):
        trainer.fit()


def trained(run_dir: Path, step: int) -> list[str]:
    return [json.loads(line)["uid"] for line in (run_dir / f"rollouts/{step}.jsonl").read_text().splitlines()]


@pytest.mark.ray
def test_a_batch_that_is_sampled_and_has_not_trained_is_not_lost(
    tmp_path: Path, groups: dict[str, WorkerGroup]
) -> None:
    overrides = ("trainer.save_freq=100", "trainer.val_before_train=false", "data.val_files=null")
    make_trainer(tmp_path / "a", groups, *overrides).fit()
    terminated_in(make_trainer(tmp_path / "b", groups, *overrides), "rollout", step=2, times=1)
    resumed = make_trainer(tmp_path / "b", groups, *overrides)
    resumed.resume()
    assert resumed.step == 1
    assert len(resumed.sampler.restored) == 4, "nor are its responses"
    resumed.fit()
    for step in (1, 2, 3):
        assert trained(tmp_path / "b/run", step) == trained(tmp_path / "a/run", step)


@pytest.mark.ray
def test_between_two_steps_nothing_is_saved(tmp_path: Path, groups: dict[str, WorkerGroup]) -> None:
    """The second SIGTERM ends an update: the weights are no finished step's."""
    trainer = make_trainer(tmp_path, groups, "trainer.save_freq=100", "data.val_files=null")
    terminated_in(trainer, "update", step=2, times=2)
    assert list((tmp_path / "run").glob("global_step_*")) == []


def test_a_run_that_is_told_to_end_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM came in the update, and then an actor rank was lost."""

    def fit() -> None:
        preemption.hold()
        preemption.handle(signal.SIGTERM, None)
        raise WorkerLost("its process died", "actor", 0)

    preemption = Preemption()
    roles = SimpleNamespace(holds_state=lambda role: role == "actor")
    trainer = SimpleNamespace(fit=fit, roles=roles, saver=SimpleNamespace(last=None))
    monkeypatch.setattr(run, "_build", lambda *args: (trainer, None))
    with pytest.raises(Terminated):
        run._train(load_config([])[0], Path(), preemption)
    assert not preemption.held
