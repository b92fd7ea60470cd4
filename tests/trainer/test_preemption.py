"""SIGTERM and Ctrl-C: when they wait, what is saved, and what is not."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from grpo_dist.errors import Interrupted, Terminated, WorkerLost
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.trainer.checkpoint.folder import read_state
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.rollout.sampling import Rollout
from grpo_dist.trainer.trainer import GRPOTrainer
from tests.messages import says
from tests.trainer.fake_run import Groups, make_trainer
from tests.trainer.recorded import shown_by, trained_rows


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, Terminated), (signal.SIGINT, Interrupted)])
def test_it_waits_while_the_run_is_held_and_says_so_but_not_the_second_one(number: Any, ends: Any, capfd: Any) -> None:
    at_once, preemption = Preemption(), Preemption()
    with pytest.raises(ends):
        at_once.handle(number, None)
    assert at_once.asked
    for _ in range(2):
        preemption.held = True
        preemption.release()
    assert not preemption.asked, "without it nothing happens"
    preemption.held = True
    preemption.handle(number, None)
    says(capfd.readouterr().err, number.name, "checkpoint", f"another {number.name}")
    with pytest.raises(ends):
        preemption.handle(number, None)
    with pytest.raises(ends):
        preemption.release()


@pytest.mark.usefixtures("handlers")
def test_the_handlers_of_before_come_back() -> None:
    """A background job of a script, whose terminal another program uses, goes on ignoring Ctrl-C."""

    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preemption = Preemption()
    preemption.listen()
    assert handlers() == [signal.SIG_IGN, preemption.handle]
    preemption.restore()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before, preemption = handlers(), Preemption()
    preemption.listen()
    preemption.listen()  # a run does it twice
    assert handlers() == [preemption.handle] * 2
    preemption.ignore()
    assert handlers() == [signal.SIG_IGN] * 2
    preemption.restore()
    assert handlers() == before


def on_workers(test: Any) -> Any:
    """A test of the deep tier that handles signals."""
    return pytest.mark.deep(pytest.mark.ray(pytest.mark.usefixtures("handlers")(test)))


NEVER = ("trainer.save_freq=100", "data.val_files=null")


def goes_on_as_if_undisturbed(tmp_path: Path, groups: Groups, num_restored: int = 0) -> None:
    """The run that was stopped in `b` resumes at step 1 and trains on what the one in `a` trains on."""
    make_trainer(tmp_path / "a", groups, *NEVER).fit()
    resumed = make_trainer(tmp_path / "b", groups, *NEVER)
    assert resumed.step == 1
    assert len(resumed.sampler.restored) >= num_restored, "nor are its responses"
    resumed.fit()
    for step in (1, 2, 3):
        first, second = (trained_rows(tmp_path / name / "run", step) for name in "ab")
        assert [row["uid"] for row in first] == [row["uid"] for row in second]


def terminated_in_the_rollout(
    trainer: GRPOTrainer, *, step: int, num_scored: int, number: int = signal.SIGTERM
) -> None:
    """Run until a signal comes in a step's rollout, when so many groups are scored."""
    rollout = trainer.sampler.rollout

    async def interrupted(coming: int) -> Rollout:
        sampling = asyncio.ensure_future(rollout(coming))
        await asyncio.sleep(0)
        if coming == step:
            while len(trainer.sampler.open[step].jobs[0].scores) < num_scored:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), number)
        return await sampling

    trainer.sampler.rollout = interrupted  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer.preemption.listen()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.preemption.number == number


@on_workers
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_batch_that_is_sampled_and_has_not_trained_is_not_lost(tmp_path: Path, groups: Groups, number: Any) -> None:
    stopped = make_trainer(tmp_path / "b", groups, *NEVER)
    terminated_in_the_rollout(stopped, step=2, num_scored=4, number=number)
    assert stopped.preemption.checkpoint == tmp_path / "b/run/global_step_1"
    goes_on_as_if_undisturbed(tmp_path, groups, num_restored=4)


@on_workers
def test_a_draw_is_not_cut_in_two(tmp_path: Path, groups: Groups) -> None:
    """SIGTERM comes when the order has moved on and the prompts are not yet written down."""
    trainer = make_trainer(tmp_path / "b", groups, *NEVER)
    draw = trainer.sampler._draw

    def interrupted(missing: int | None) -> list[int]:
        drawn = draw(missing)
        if trainer.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return drawn

    trainer.sampler._draw = interrupted  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, trainer.preemption.handle)
    with pytest.raises(Terminated):
        trainer.fit()
    goes_on_as_if_undisturbed(tmp_path, groups)


@on_workers
def test_the_checkpoint_knows_the_validation_of_its_step(tmp_path: Path, groups: Groups) -> None:
    """Also one that is written in the rollout after it: `keep_best_metric` looks there."""
    trainer = make_trainer(tmp_path, groups, "trainer.save_freq=100", "trainer.test_freq=1")
    terminated_in_the_rollout(trainer, step=2, num_scored=0)
    assert read_state(tmp_path / "run/global_step_1").metrics["val-core/arithmetic/reward/mean@1"] == 8


@on_workers
def test_a_checkpoint_that_cannot_be_written_is_told(tmp_path: Path, groups: Groups) -> None:
    """The workers had the signal too, say. The run ends as SIGTERM ends it."""
    trainer = make_trainer(tmp_path, groups, *NEVER)
    said = shown_by(trainer)
    trainer.saver.begin = AsyncMock(side_effect=WorkerLost("its process died", "actor", 0))  # type: ignore[method-assign]
    terminated_in_the_rollout(trainer, step=2, num_scored=0)
    assert said[-1].startswith("SIGTERM: no checkpoint could be written: actor worker 0")


@on_workers
def test_between_two_steps_nothing_is_saved(tmp_path: Path, groups: Groups) -> None:
    """The second SIGTERM ends an update: the weights are no finished step's."""
    trainer = make_trainer(tmp_path, groups, *NEVER)
    update = trainer.update

    def interrupted(batch: DataProtoRef) -> DataProtoRef:
        trained = update(batch)
        for _ in range(2 * (trainer.step == 1)):
            trainer.preemption.handle(signal.SIGTERM, None)
        return trained

    trainer.update = interrupted  # type: ignore[method-assign]
    with pytest.raises(Terminated):
        trainer.fit()
    assert list((tmp_path / "run").glob("global_step_*")) == []


def test_another_thread_has_no_signals_to_handle() -> None:
    before, preemption = signal.getsignal(signal.SIGTERM), Preemption()
    with ThreadPoolExecutor(1) as threads:
        for method in (preemption.listen, preemption.ignore, preemption.restore):
            threads.submit(method).result()
    assert signal.getsignal(signal.SIGTERM) == before
