"""The loop on ranks that train nothing: what it asks for and when, what it reports, and where it goes on."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.algorithms.settings import PreferenceSettings, TrainingSettings
from grpo_dist.assets.model_folder import Usage
from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError, Interrupted, Terminated, TrainingDiverged
from grpo_dist.plan.commands import REWARD_MODEL
from grpo_dist.plan.plan import make_plan
from grpo_dist.protocol import DataProto, Mean, Metric, Sum
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.tracking.base import Trackers
from grpo_dist.tracking.summary import Progress
from grpo_dist.trainer.checkpoint.folder import read_state
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest
from grpo_dist.trainer.checkpoint.saver import find_resumed
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.supervised.rows import total_steps
from grpo_dist.trainer.supervised.trainer import SupervisedTrainer
from grpo_dist.workers.roles import Roles
from grpo_dist.workers.supervised import SupervisedGroup
from tests.messages import refuses, says
from tests.runtime.fakes import Fakes
from tests.trainer.checkpoints import Writer
from tests.trainer.recorded import Rows as Recorded
from tests.trainer.supervised.test_rows import pair, rows_of

NUM_ROWS, BATCH = 12, 3
LOSS = "reward_model/loss"
PEAK = {"resident": 1.5}


@dataclass
class Model(Writer, SupervisedGroup):
    """Notes what it is asked for; its loss is the number of the step, and of a validation a tenth of it."""

    done: bool = True
    has_moved: bool = True
    log: list[str] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    fails_at: int = -1
    workers: WorkerGroup = field(default_factory=lambda: Fakes("reward_model", 2, peak_memory_gib={0: PEAK, 1: PEAK}))

    async def train(self, parts: Sequence[DataProto], objective: TrainingSettings, step: int) -> dict[str, Metric]:
        assert objective == PreferenceSettings()
        if step == self.fails_at:
            raise TrainingDiverged(f"step {step}: loss nan")
        self.log.append(f"train {step}")
        self.batches.append(sorted({uid.partition(": ")[2] for part in parts for uid in part["uid"]}))
        return {LOSS: Sum(float(step)), "reward_model/accuracy": Mean(0.5, 1)}

    async def evaluate(self, parts: Sequence[DataProto], objective: TrainingSettings, step: int) -> dict[str, Metric]:
        self.log.append(f"validate {step}")
        return {LOSS: Sum(step / 10)}

    async def forward_report(self) -> str:
        return "shared prompts"

    async def begin_save(self, folder: str) -> None:
        self.log.append(f"save {Path(folder).parent.name}")
        await super().begin_save(folder)

    async def export_hf_model(self, folder: str, dtype: str, usage: Usage) -> None:
        self.usage = usage
        self.log.append(f"export {Path(folder).name} {dtype}")


@dataclass
class Told(Recorded):
    """Notes in the model's log when a step is reported."""

    of_model: list[str]
    rows: list[dict[str, float]] = field(default_factory=list)

    def log(self, metrics: Any, step: int) -> None:
        self.of_model.append(f"report {step}")
        super().log(metrics, step)


QUIET = ("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1")


def make(tmp_path: Path, *overrides: str, model: Model | None = None) -> tuple[SupervisedTrainer, Model, Told]:
    """A trainer of 4 steps, resumed where there is a checkpoint."""
    given = (f"data.train_batch_size={BATCH}", f"trainer.default_local_dir={tmp_path}", *QUIET)
    config, _ = load_command([*given, *overrides], REWARD_MODEL)
    trained, found = model or Model(), rows_of(*map(pair, range(NUM_ROWS)))
    rows, told, roles = replace(found, validation=found.train[:2]), Told(trained.log), Roles({"reward_model": trained})
    steps, trackers = total_steps(config, rows), Trackers({"rows": told}, resumed_step=None)
    trainer = SupervisedTrainer(make_plan(config, steps), roles, rows, trackers, Progress(steps, 0, None), Preemption())
    trainer.saver.async_save = False
    resumed = find_resumed(config, rows.identity)
    if resumed is not None:
        trainer.restore(resumed, {})
    return trainer, trained, told


def test_the_exported_model_says_which_checkpoint_it_is_of(tmp_path: Path) -> None:
    """Also where the run goes on from the last one, only to export it; None where none is of its step."""
    trainer, model, _ = make(tmp_path / "none")
    trainer.fit()
    assert (model.usage.step, model.usage.checkpoint, model.usage.dtype) == (4, None, "fp32")
    for freq in (4, 4, -1):
        trainer, model, _ = make(tmp_path / "some", f"trainer.save_freq={freq}")
        trainer.fit()
        assert model.usage.step == 4
        assert model.usage.checkpoint == checkpoint_digest(tmp_path / "some/global_step_4")
    assert model.log == ["export huggingface fp32"], "nothing was left to train"


def terminate_in(trainer: Any, method: str, step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
    """Run until a signal comes in a method."""
    original: Callable[[], None] = getattr(trainer, method)

    def interrupted() -> None:
        original()
        if trainer.step == step:
            for _ in range(times):
                trainer.preemption.handle(number, None)

    setattr(trainer, method, interrupted)
    with pytest.raises(Terminated if number == signal.SIGTERM else Interrupted):
        trainer.fit()


def test_a_step_is_trained_validated_saved_and_reported_in_this_order(tmp_path: Path) -> None:
    twice = ("trainer.test_freq=2", "trainer.save_freq=2", "trainer.val_before_train=true")
    trainer, model, _ = make(tmp_path / "a", *twice)
    trainer.fit()
    second, last = (
        [f"train {step}", f"validate {step}", f"save global_step_{step}.tmp", f"report {step}"] for step in (2, 4)
    )
    begin = ["validate 0", "report 0", "train 1", "report 1"]
    assert model.log == [*begin, *second, "train 3", "report 3", *last, "export huggingface fp32"]
    rows = sorted(row for batch in model.batches for row in batch)
    assert rows == sorted(f"rows.jsonl, line {number}" for number in range(NUM_ROWS)), "each once an epoch"
    odd = ("trainer.test_freq=3", "trainer.save_freq=100", "trainer.export_hf_model=false")
    trainer, model, _ = make(tmp_path / "b", *odd)
    trainer.fit()
    assert model.log[4:] == ["train 3", "validate 3", "report 3", *last], "nothing is exported"


def test_metrics_of_a_step(tmp_path: Path) -> None:
    trainer, _, told = make(tmp_path, "trainer.test_freq=4", "trainer.total_epochs=2")
    trainer.fit()
    assert [row["step"] for row in told.rows] == [row[LOSS] for row in told.rows] == list(range(1, 9))
    assert {row["step"]: row[f"val/{LOSS}"] for row in told.rows if f"val/{LOSS}" in row} == {4: 0.4, 8: 0.8}
    assert {row["step"] for row in told.rows if "timing_s/testing" in row} == {4, 8}, "of this step alone"
    assert told.rows[-1]["training/epoch"] >= 1
    for row in told.rows:
        assert row["perf/total_num_tokens"] == BATCH * (4 + 2 + 3), "the prompt of a pair once"
        assert row["perf/throughput"] == row["perf/tokens_per_s"]
        assert row["timing_s/step"] >= row["timing_s/train"] > 0
    assert told.rows[-1]["perf/max_memory_resident_gb/reward_model"] == 1.5


def test_a_resumed_run_goes_on_at_the_right_batch(tmp_path: Path) -> None:
    whole, undisturbed, _ = make(tmp_path / "whole", "trainer.total_epochs=2")
    whole.fit()
    saves = ("trainer.total_epochs=2", "trainer.save_freq=2")
    first, before, _ = make(tmp_path / "run", *saves, model=Model(fails_at=6))
    with refuses(TrainingDiverged, "step 6") as caught:
        first.fit()
    says(caught.value.__notes__, "'train'", "step 6")
    resumed, after, told = make(tmp_path / "run", "trainer.total_epochs=2", "trainer.val_before_train=true")
    assert (resumed.step, len(before.batches)) == (4, 5)
    resumed.fit()
    assert "validate 0" not in after.log, "it was before"
    assert [row["step"] for row in told.rows] == [5, 6, 7, 8]
    assert before.batches[:4] + after.batches == undisturbed.batches


def test_the_best_checkpoint_of_a_loss_is_the_lowest(tmp_path: Path) -> None:
    """Validation's loss rises from step to step here, so the first one stays beside the last."""
    best = (f"trainer.keep_best_metric=val/{LOSS}", "trainer.max_actor_ckpt_to_keep=1")
    make(tmp_path, "trainer.test_freq=1", "trainer.save_freq=1", *best)[0].fit()
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_1", "global_step_4"]
    assert read_state(tmp_path / "global_step_1").metrics == {f"val/{LOSS}": 0.1}


def test_a_metric_that_validation_does_not_give_is_told_at_the_first_one(tmp_path: Path) -> None:
    metric = "trainer.keep_best_metric=val/reward_model/los"
    trainer, model, _ = make(tmp_path, "trainer.val_before_train=true", "trainer.test_freq=2", metric)
    with refuses(ConfigError, metric, f"val/{LOSS}") as caught:
        trainer.fit()
    assert model.log == ["validate 0"]
    says(caught.value.__notes__, "'testing'", "step 0")


def ends_at(value: float) -> list[str]:
    return [f"trainer.stop_at={{metric: val/{LOSS}, value: {value}}}", "trainer.test_freq=2", "trainer.save_freq=100"]


def test_a_loss_that_is_reached_ends_the_run_as_its_last_step_does(tmp_path: Path) -> None:
    """Of 4 steps the second has a loss of 0.2. Started again nothing is trained; with another value two steps are."""
    trainer, model, told = make(tmp_path, *ends_at(0.2))
    trainer.fit()
    second = ["train 2", "validate 2", "save global_step_2.tmp", "report 2"]
    assert model.log == ["train 1", "report 1", *second, "export huggingface fp32"]
    assert model.usage.step == told.rows[-1]["step"] == 2
    again, model, _ = make(tmp_path, *ends_at(0.2))
    again.fit()
    assert (again.step, model.log) == (2, ["export huggingface fp32"])
    other, model, _ = make(tmp_path, *ends_at(0.1))
    other.fit()
    assert [each for each in model.log if each.startswith("train")] == ["train 3", "train 4"]


def test_what_is_reached_before_the_first_step_needs_none_and_what_is_not_reached_ends_nothing(tmp_path: Path) -> None:
    """Nor is a validation alone anything that could end."""
    validated = ["validate 0", "report 0"]
    for value, key, more in ((0.0, "val_before_train", ["export huggingface fp32"]), (1.0, "val_only", [])):
        trainer, model, told = make(tmp_path / key, f"trainer.{key}=true", *ends_at(value))
        trainer.fit()
        assert (model.log, told.rows[0][f"val/{LOSS}"]) == ([*validated, *more], 0)
        assert not list((tmp_path / key).glob("global_step_*"))
    trainer, model, _ = make(tmp_path, *ends_at(0.05))
    trainer.fit()
    assert "train 4" in model.log


@pytest.mark.parametrize(
    ("method", "step", "number"),
    [("train", 1, signal.SIGTERM), ("train", 1, signal.SIGINT), ("measure", 2, signal.SIGTERM)],
)
def test_the_first_signal_in_a_step_lets_it_end_and_saves_it(
    tmp_path: Path, method: str, step: int, number: int
) -> None:
    trainer, model, told = make(tmp_path, "trainer.save_freq=100")
    terminate_in(trainer, method, step=step, number=number)
    assert told.rows[-1]["step"] == 2
    assert model.log[-2:] == ["report 2", "save global_step_2.tmp"]
    assert trainer.preemption.checkpoint == tmp_path / "global_step_2"
    assert read_state(tmp_path / "global_step_2").step == 2
    resumed, after, _ = make(tmp_path)
    resumed.fit()
    assert after.log[0] == "train 3", "the same command goes on from there"


def test_a_signal_saves_nothing_twice_and_the_second_one_leaves_at_once_without_a_checkpoint(tmp_path: Path) -> None:
    trainer, model, _ = make(tmp_path / "one", "trainer.save_freq=2")
    terminate_in(trainer, "measure", step=2)
    assert [each for each in model.log if each.startswith("save")] == ["save global_step_2.tmp"]
    trainer, model, _ = make(tmp_path / "two", "trainer.save_freq=100")
    terminate_in(trainer, "train", step=1, number=signal.SIGINT, times=2)
    assert (trainer.preemption.checkpoint, model.log[-1]) == (None, "train 2")


def test_a_checkpoint_that_is_being_written_is_completed(tmp_path: Path) -> None:
    """Ctrl-C comes while the ranks write in the background."""
    trainer, model, _ = make(tmp_path, "trainer.save_freq=2")
    trainer.saver.async_save, model.done = True, False
    terminate_in(trainer, "report", step=2, number=signal.SIGINT)
    assert trainer.preemption.checkpoint == tmp_path / "global_step_2"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
