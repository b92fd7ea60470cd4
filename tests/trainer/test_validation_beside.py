"""Validation beside training (`trainer.val_in_background`), on fake workers; on real ones: e2e/test_real_workers.py."""

import asyncio
import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_dist.errors import RewardError
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.trainer.checkpoint.folder import read_state
from grpo_dist.trainer.rollout.job import RolloutJob
from grpo_dist.trainer.trainer import GRPOTrainer
from tests.messages import says
from tests.processes import spawned
from tests.trainer.fake_run import Groups, make_trainer
from tests.trainer.fakes import HeldRolloutWorker
from tests.trainer.recorded import history, shown_by
from tests.trainer.test_preemption import terminated_in_the_rollout

pytestmark = [pytest.mark.ray, pytest.mark.deep]

METRIC = "val-core/arithmetic/reward/mean@1"
AT_ONCE = ("trainer.test_freq=1", "trainer.save_freq=100", "trainer.val_before_train=false")
BESIDE = (*AT_ONCE, "trainer.val_in_background=true")


class HoldsOneValidation(HeldRolloutWorker):
    """Answers no validation prompt by the weights of the first update, until it is released."""

    def is_held(self, uid: str) -> bool:
        return uid.startswith("val-") and self.version == 1

    async def num_held(self) -> int:
        return len(self.running)


@pytest.fixture(scope="module")
def holding(groups: Groups) -> Iterator[Groups]:
    with spawned("rollout", HoldsOneValidation, [()]) as rollout:
        yield groups | {"rollout": rollout}


def validated(trainer: GRPOTrainer) -> dict[float, dict[str, float]]:
    """What validations have said, by step."""
    rows: dict[float, dict[str, float]] = {row["step"]: {} for row in history(trainer)}
    for row in history(trainer):
        rows[row["step"]] |= {name: value for name, value in row.items() if name.startswith("val-")}
    return rows


def log_events(trainer: GRPOTrainer) -> list[str]:
    """Notes updates and syncs, by the weights that the engines have before; and steps that are logged."""
    log: list[str] = []

    def note(holder: object, name: str, said: Callable[..., str]) -> None:
        def noted(call: Any, *args: Any) -> Any:
            log.append(f"{name} {said(*args)}")
            return call(*args)

        setattr(holder, name, functools.partial(noted, getattr(holder, name)))

    for name in ("update", "sync_weights"):
        note(trainer, name, lambda *args: str(trainer.weight_version))
    note(trainer.trackers, "log", lambda metrics, step: f"{step}{' validated' if METRIC in metrics else ''}")
    return log


async def until_held(workers: WorkerGroup, num_prompts: int) -> None:
    while await workers.ask(0, "test", "num_held") < num_prompts:
        await asyncio.sleep(0.01)


def test_new_weights_wait_for_it_and_training_does_not_until_then(holding: Groups, tmp_path: Path) -> None:
    trainer, workers = make_trainer(tmp_path, holding, *BESIDE), holding["rollout"]
    log, finished = log_events(trainer), trainer.validation.finished

    async def released() -> RolloutJob:
        waiting = asyncio.ensure_future(finished())
        if trainer.weight_version == 1:
            await until_held(workers, 4)
            assert not waiting.done()
            log.append("released")
            await workers.ask(0, "test", "release")
        return await waiting

    trainer.validation.finished = released  # type: ignore[method-assign]
    trainer.fit()
    assert log == [
        *("sync_weights -1", "update 0", "sync_weights 0", "log 1"),
        *("update 1", "released", "log 1 validated", "sync_weights 1", "log 2"),
        *("update 2", "log 2 validated", "sync_weights 2", "log 3 validated"),
    ]
    assert ["timing_s/testing" in row for row in history(trainer) if "timing_s/step" in row] == [False, True, True]


def test_where_no_engine_is_left_with_the_weights_its_figures_are_missing(holding: Groups, tmp_path: Path) -> None:
    """Its only engine dies in the update; the next one gets the weights after it. What is lost is said."""
    trainer, workers = make_trainer(tmp_path, holding, *BESIDE), holding["rollout"]
    shown, finished = shown_by(trainer), trainer.validation.finished

    async def killed() -> RolloutJob:
        if trainer.weight_version == 1:
            await until_held(workers, 4)
            os.kill((await workers.ask(0, "test", "address")).pid, signal.SIGKILL)
        return await finished()

    trainer.validation.finished = killed  # type: ignore[method-assign]
    trainer.fit()
    assert [METRIC in metrics for metrics in validated(trainer).values()] == [False, True, True]
    assert len(trainer.roles.restarts.failures) == 1
    (told,) = [text for text in shown if "engines" in text]
    says(told, "step 1", "validation")
    assert trainer.pump.tasks == set()


@pytest.mark.parametrize("staleness", [0, 1])
def test_its_prompts_are_sent_behind_the_next_steps_before_later_ones(groups: Groups, tmp_path: Path, staleness: int):
    trainer = make_trainer(tmp_path, groups, *BESIDE, f"trainer.max_staleness={staleness}")
    trainer.pump.submit = submit = Mock(wraps=trainer.pump.submit)  # type: ignore[method-assign]
    trainer.fit()
    calls = ((each.args[0], each.kwargs) for each in submit.call_args_list)
    sent = [(requests[0].uid.partition("-")[0], options.get("first", False)) for requests, options in calls]
    steps = [("step1", False), ("step2", False), ("step3", False)]
    last, beside = [("val", False)] * 2, [*steps, *[("val", True)] * 3]
    assert sent == (beside if staleness else [*steps[:2], ("val", False), steps[2], *last])
    assert [METRIC in metrics for metrics in validated(trainer).values()] == [True, True, True]


@pytest.mark.usefixtures("handlers")
def test_a_run_that_is_stopped_meanwhile_validates_again_when_it_goes_on(groups: Groups, tmp_path: Path) -> None:
    """By the same weights, before it trains on, also where the key has been changed: its record is the same."""
    whole = make_trainer(tmp_path / "whole", groups, *BESIDE)
    whole.fit()
    stopped = make_trainer(tmp_path / "cut", groups, *BESIDE)
    terminated_in_the_rollout(stopped, step=2, num_scored=4)
    state = read_state(tmp_path / "cut/run/global_step_1")
    assert (state.validating, state.metrics) == (True, {})
    assert stopped.pump.tasks == set()
    resumed = make_trainer(tmp_path / "cut", groups, *AT_ONCE)
    resumed.fit()
    assert [row["step"] for row in history(resumed)] == [1, 2, 3]
    assert validated(resumed) == validated(whole)
    for step in (1, 2, 3):
        first, second = (tmp_path / name / f"run/validation/{step}.jsonl" for name in ("whole", "cut"))
        assert first.read_text() == second.read_text()
    assert read_state(tmp_path / "cut/run/global_step_3").validating is False


def test_the_value_that_ends_the_run_ends_it_at_its_own_step(groups: Groups, tmp_path: Path) -> None:
    """The next step is sampled by then; it does not train. The checkpoint is written again, with the figures."""
    ends = (*BESIDE, "trainer.save_freq=1", f"trainer.stop_at={{metric: {METRIC}, value: 8}}")
    trainer = make_trainer(tmp_path, groups, *ends)
    shown, log = shown_by(trainer), log_events(trainer)
    trainer.fit()
    assert log == ["sync_weights -1", "update 0", "sync_weights 0", "log 1", "log 1 validated"]
    says(shown, "step 1", METRIC, "trainer.stop_at.value=8")
    state = read_state(tmp_path / "run/global_step_1")
    assert (state.validating, state.metrics[METRIC]) == (False, 8)
    again = make_trainer(tmp_path, groups, *ends)
    again.fit()
    assert history(again) == []
    other = make_trainer(tmp_path, groups, *BESIDE)
    assert len(other.sampler.restored) == 4, "the groups that were sampled are not lost"
    other.fit()
    assert [*validated(other)] == [2, 3]


def test_a_step_that_ends_the_run_from_outside_is_validated_and_its_checkpoint_waits(groups: Groups, tmp_path: Path):
    judged = ("trainer.save_freq=2", f"trainer.keep_best_metric={METRIC}")
    for name, overrides, ends in (("ended", ["trainer.save_freq=1"], 2), ("judged", judged, 0)):
        trainer = make_trainer(tmp_path / name, groups, *BESIDE, *overrides)
        trainer.on_step = lambda step, metrics, ends=ends: step == ends
        log = log_events(trainer)
        trainer.fit()
        assert [METRIC in metrics for metrics in validated(trainer).values()] == [True] * (ends or 3)
        state = read_state(tmp_path / name / "run/global_step_2")
        assert (state.validating, state.metrics[METRIC]) == (False, 8)
    logged = [text for text in log if text.startswith("log")]
    assert logged == ["log 1", "log 1 validated", "log 2 validated", "log 3 validated"]


def test_before_engines_sleep_it_is_waited_for(groups: Groups, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, groups, *BESIDE)
    assert not trainer.validation.comes_first
    trainer.validation.place = dataclasses.replace(trainer.plan.place, engines_sleep=True)
    assert trainer.validation.comes_first
    log = log_events(trainer)
    trainer.fit()
    assert log[4:8] == ["log 1 validated", "update 1", "sync_weights 1", "log 2"]


def test_an_error_in_it_names_its_step(groups: Groups, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, groups, *BESIDE)
    score = trainer.pump.reward.score

    async def failing(group: Any, task: Any, limit: float) -> Any:
        if task.validation:
            raise RewardError("the judge is away")
        return await score(group, task, limit)

    trainer.pump.reward.score = failing  # type: ignore[method-assign]
    with pytest.raises(RewardError) as caught:
        trainer.fit()
    (note,) = caught.value.__notes__
    says(note, "'testing'", "step 1")
    assert trainer.step == 1
    assert trainer.pump.tasks == set()
