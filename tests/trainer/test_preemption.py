"""SIGTERM and Ctrl-C: when they wait, what is saved, and what is not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import Interrupted, Terminated, WorkerLost
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.trainer.checkpoint.folder import read_state
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.rollout.sampling import Rollout
from grpo_dist.trainer.trainer import GRPOTrainer
from tests.messages import says
from tests.trainer.fake_run import make_trainer

SIGNALS = pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGTERM, Terminated), (signal.SIGINT, Interrupted)], ids=["SIGTERM", "SIGINT"]
)


@SIGNALS
def test_it_ends_the_run_at_once_where_the_state_is_a_finished_steps(
    number: signal.Signals, ends: type[Interrupted]
) -> None:
    preemption = Preemption()
    with pytest.raises(ends) as caught:
        preemption.handle(number, None)
    assert preemption.asked
    assert type(caught.value) is ends


@SIGNALS
def test_it_waits_while_the_run_is_held_and_says_so(
    number: signal.Signals, ends: type[Interrupted], capfd: pytest.CaptureFixture[str]
) -> None:
    preemption = Preemption()
    preemption.held = True
    preemption.handle(number, None)
    assert preemption.asked
    says(capfd.readouterr().err, number.name, "checkpoint", f"another {number.name}")
    with pytest.raises(ends):
        preemption.release()


@SIGNALS
def test_the_second_one_does_not_wait(number: signal.Signals, ends: type[Interrupted]) -> None:
    preemption = Preemption()
    preemption.held = True
    preemption.handle(number, None)
    with pytest.raises(ends):
        preemption.handle(number, None)


def test_without_it_nothing_happens() -> None:
    preemption = Preemption()
    for _ in range(2):
        preemption.held = True
        preemption.release()
    assert not preemption.asked


@pytest.mark.usefixtures("handlers")
def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """A background job of a script, whose terminal is used by another program."""
    preemption = Preemption()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preemption.listen()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == preemption.handle
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preemption.listen()
    assert signal.getsignal(signal.SIGINT) == preemption.handle


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


def terminated_in_the_rollout(
    trainer: GRPOTrainer, *, step: int, num_scored: int, number: signal.Signals = signal.SIGTERM
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


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_batch_that_is_sampled_and_has_not_trained_is_not_lost(
    tmp_path: Path, groups: dict[str, WorkerGroup], number: signal.Signals
) -> None:
    overrides = ("trainer.save_freq=100", "trainer.val_before_train=false", "data.val_files=null")
    make_trainer(tmp_path / "a", groups, *overrides).fit()
    stopped = make_trainer(tmp_path / "b", groups, *overrides)
    terminated_in_the_rollout(stopped, step=2, num_scored=4, number=number)
    assert stopped.preemption.checkpoint == tmp_path / "b/run/global_step_1"
    resumed = make_trainer(tmp_path / "b", groups, *overrides)
    assert resumed.step == 1
    assert len(resumed.sampler.restored) == 4, "nor are its responses"
    resumed.fit()
    for step in (1, 2, 3):
        assert trained(tmp_path / "b/run", step) == trained(tmp_path / "a/run", step)


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.usefixtures("handlers")
def test_a_draw_is_not_cut_in_two(tmp_path: Path, groups: dict[str, WorkerGroup]) -> None:
    """SIGTERM comes when the order has moved on and the prompts are not yet written down."""
    overrides = ("trainer.save_freq=100", "trainer.val_before_train=false", "data.val_files=null")
    make_trainer(tmp_path / "a", groups, *overrides).fit()
    trainer = make_trainer(tmp_path / "b", groups, *overrides)
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
    resumed = make_trainer(tmp_path / "b", groups, *overrides)
    assert resumed.step == 1
    resumed.fit()
    for step in (1, 2, 3):
        assert trained(tmp_path / "b/run", step) == trained(tmp_path / "a/run", step)


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.usefixtures("handlers")
def test_the_checkpoint_knows_the_validation_of_its_step(tmp_path: Path, groups: dict[str, WorkerGroup]) -> None:
    """Also one that is written in the rollout after it: `keep_best_metric` looks there."""
    trainer = make_trainer(tmp_path, groups, "trainer.save_freq=100", "trainer.test_freq=1")
    terminated_in_the_rollout(trainer, step=2, num_scored=0)
    state = read_state(tmp_path / "run/global_step_1")
    assert state.metrics["val-core/arithmetic/reward/mean@1"] == 8


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.usefixtures("handlers")
def test_a_checkpoint_that_cannot_be_written_is_told(
    tmp_path: Path, groups: dict[str, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers had the signal too, say. The run ends as SIGTERM ends it."""
    trainer = make_trainer(tmp_path, groups, "trainer.save_freq=100", "data.val_files=null")
    said: list[str] = []
    monkeypatch.setattr(trainer.progress, "message", said.append)

    async def begin(*args: Any) -> None:
        raise WorkerLost("its process died", "actor", 0)

    monkeypatch.setattr(trainer.saver, "begin", begin)
    terminated_in_the_rollout(trainer, step=2, num_scored=0)
    assert said[-1].startswith("SIGTERM: no checkpoint could be written: actor worker 0")


@pytest.mark.deep
@pytest.mark.ray
def test_between_two_steps_nothing_is_saved(tmp_path: Path, groups: dict[str, WorkerGroup]) -> None:
    """The second SIGTERM ends an update: the weights are no finished step's."""
    trainer = make_trainer(tmp_path, groups, "trainer.save_freq=100", "data.val_files=null")
    terminated_in(trainer, "update", step=2, times=2)
    assert list((tmp_path / "run").glob("global_step_*")) == []


def test_the_handlers_of_before_come_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    before = [signal.getsignal(number) for number in numbers]
    preemption = Preemption()
    preemption.listen()
    preemption.listen()  # a run does it twice
    assert [signal.getsignal(number) for number in numbers] == [preemption.handle, preemption.handle]
    preemption.ignore()
    assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN, signal.SIG_IGN]
    preemption.restore()
    assert [signal.getsignal(number) for number in numbers] == before
    signal.signal(signal.SIGINT, outside)


def test_another_thread_has_no_signals_to_handle() -> None:
    before = signal.getsignal(signal.SIGTERM)
    preemption, failed = Preemption(), []

    def listen() -> None:
        try:
            preemption.listen()
            preemption.ignore()
            preemption.restore()
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert failed == []
    assert signal.getsignal(signal.SIGTERM) == before
