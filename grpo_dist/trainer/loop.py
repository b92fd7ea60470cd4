"""What the loops of all trainers have: when to validate and save, and a checkpoint when a signal ends the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import GrpoDistError
from grpo_dist.tracking.base import Trackers
from grpo_dist.tracking.console import Progress
from grpo_dist.trainer.checkpoint.saver import CheckpointSaver
from grpo_dist.trainer.model_usage import exported_usage
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.record import EXPORTED
from grpo_dist.workers.event_loop import run

if TYPE_CHECKING:  # it imports Ray, which must not be imported before the run connects
    from grpo_dist.trainer.profiler import StepProfiler
    from grpo_dist.workers.gang import Gang

StepCallback = Callable[[int, dict[str, float]], Any]


class TrainingLoop:
    """The base of trainers, which set its attributes.

    Attributes:
        config: the whole run's config.
        total_steps: training steps of the run.
        saver: writes checkpoints.
        trackers: where metrics go.
        progress: the display at the terminal.
        preemption: whether a signal has come to end the run.
        metrics: of the step.
        step: the last step that is trained.
        profiler: of the steps that are to be profiled; None: there are none.
        on_step: called with step and metrics after each one; what is true ends the training there.
    """

    config: JobConfig
    total_steps: int
    saver: CheckpointSaver
    trackers: Trackers
    progress: Progress
    preemption: Preemption
    metrics: dict[str, float]
    step: int
    profiler: StepProfiler | None = None
    on_step: StepCallback | None = None

    def fit(self) -> None:
        """Train until `total_steps`, validating and saving on the way."""
        raise NotImplementedError

    def validate(self) -> None:
        """Validate the model as it is."""
        raise NotImplementedError

    def save(self) -> None:
        """Begin to write a checkpoint."""
        raise NotImplementedError

    def report(self) -> None:
        """Send the metrics of the step to the trackers and the display."""
        raise NotImplementedError

    def end_step(self) -> None:
        """What follows a trained step: validation and a checkpoint where they are due, then the report."""
        if self.due(self.config.trainer.test_freq):
            self.validate()
        if self.save_is_due():
            self.save()
        self.report()
        run(self.saver.poll())  # after the step's metrics are on record
        if self.on_step is not None and self.on_step(self.step, dict(self.metrics)):
            self.stop()
        self.preemption.release()

    def stop(self) -> None:
        """Make the step that has just been trained the last one, with the checkpoint that the last one has."""
        self.total_steps = self.step
        if self.save_is_due() and self.saver.step < self.step:
            self.save()

    @property
    def model_dir(self) -> Path:
        """Where the trained model is written."""
        return Path(self.config.trainer.default_local_dir, EXPORTED)

    async def export(self, model: Gang, dtype: str) -> None:
        """Write the trained model, and how to ask it, if the config says so.

        Args:
            model: the ranks that hold it.
            dtype: "fp32" or "bf16".
        """
        if self.config.trainer.export_hf_model:
            self.progress.phase("export")
            checkpoint = self.saver.last if self.saver.step == self.step else None
            usage = exported_usage(self.config, self.step, dtype, checkpoint, self.model_dir.parent)
            await model.export_hf_model(str(self.model_dir), dtype, usage)

    def holds_state(self, role: str) -> bool:
        """Whether a role holds state that only a checkpoint can restore."""
        return role in self.saver.holders()

    @contextlib.contextmanager
    def saving_when_stopped(self) -> Iterator[None]:
        """Write a checkpoint if a signal ends what is within, and there is something new to keep. One that is being
        written in the background is completed.
        """
        try:
            yield
        except KeyboardInterrupt:
            # a second signal does not wait, and between two steps there is no state to save
            if self.preemption.asked and not self.preemption.held:
                try:
                    if self.step > self.saver.step:
                        self.progress.message(f"{self.preemption.name}: writing a checkpoint")
                        self.save()
                    run(self.saver.finish())
                except GrpoDistError as error:  # of workers that the signal was sent to as well, say
                    self.progress.message(f"{self.preemption.name}: no checkpoint could be written: {error}")
            raise
        finally:
            self.preemption.checkpoint = self.saver.last

    def due(self, frequency: int) -> bool:
        """Whether something done every `frequency` steps (-1: never) is due: also after the last step."""
        return frequency > 0 and (self.step % frequency == 0 or self.step == self.total_steps)

    def save_is_due(self) -> bool:
        """Whether a checkpoint is due: by steps, by time, or because the run ends."""
        trainer = self.config.trainer
        ends = trainer.save_interval_minutes is not None and self.step == self.total_steps
        return self.due(trainer.save_freq) or self.saver.is_due or ends
