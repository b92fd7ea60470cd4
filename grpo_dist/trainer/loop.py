"""The base of all trainers: started workers, when to validate and save, and a checkpoint when a signal ends the run.

A stage is a coroutine. When it is called, it runs on the driver's event loop, and the training loop waits for it in the
main thread. It names the batch columns it needs and the ones it adds. `@stage` checks both, measures the time, shows
the phase in the progress display, and adds a note with stage and step to any error.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from grpo_dist.assets.model_folder import Usage
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SFTConfig
from grpo_dist.config.schema_roles import ActorConfig, CriticConfig
from grpo_dist.data.sampler import CustomSampler, PromptSampler
from grpo_dist.errors import GrpoDistError, WorkerLost
from grpo_dist.plan.plan import Plan
from grpo_dist.plan.roles import roles_of
from grpo_dist.protocol.fields import require
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import blocking, run
from grpo_dist.tracking.base import Trackers, tracker_ids
from grpo_dist.tracking.metric_names import why_it_ends
from grpo_dist.tracking.summary import Progress
from grpo_dist.trainer.checkpoint.config_changes import digest_code
from grpo_dist.trainer.checkpoint.folder import RunState, run_digest
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest
from grpo_dist.trainer.checkpoint.saver import CheckpointSaver, FinishedGroups, Group, Resumed
from grpo_dist.trainer.metrics import IdleShares, PeakMemory
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.record import EXPORTED
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.roles import Roles

P = ParamSpec("P")
T = TypeVar("T")


def stage(
    name: str, *, needs: tuple[str, ...] = (), adds: tuple[str, ...] = (), counted: bool = False
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, T]]:
    """Decorate a method of the trainer as a stage.

    The trainer has `step` (int), `timings` (dict of seconds by stage) and `progress`. If the stage takes a batch, it
    is the first argument; if the stage adds columns, it returns the new batch.

    Args:
        needs: columns that the batch must have.
        adds: columns that the returned batch must have.
        counted: whether the trainer's `step` is already that of the finished step when the stage runs.

    Raises (from the decorated method):
        BatchError: a needed column is missing before, or a promised one after.
    """

    def decorate(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        @functools.wraps(method)
        def wait(*args: P.args, **kwargs: P.kwargs) -> T:
            trainer: Any = args[0]
            if needs:
                require(name, args[1].columns, needs)  # type: ignore[attr-defined]
            trainer.progress.phase(name)
            started = time.monotonic()
            try:
                result = run(method(*args, **kwargs))
            except GrpoDistError as error:
                error.add_note(f"in stage {name!r} of step {trainer.step + (not counted)}")
                raise
            trainer.timings[name] = trainer.timings.get(name, 0.0) + time.monotonic() - started
            if adds:
                assert isinstance(result, DataProtoRef)
                require(f"{name} (its result)", result.columns, adds)
            return result

        wait.stage = (name, needs, adds)  # type: ignore[attr-defined]
        return wait

    return decorate


StepCallback = Callable[[int, dict[str, float]], Any]


@dataclass
class TrainingLoop:
    """The base of trainers, which `run/build.py` makes on started workers.

    Attributes:
        step: the last one that is trained; `timings`: its seconds by stage.
        validated: the metrics of a validation after the step; {} if there was none.
        on_step: called with step and metrics after each one; what is true ends the training there.
    """

    plan: Plan[JobConfig]
    roles: Roles
    data: Any
    trackers: Trackers
    progress: Progress
    preemption: Preemption
    config: JobConfig = field(init=False)
    total_steps: int = field(init=False)
    step: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    saver: CheckpointSaver = field(init=False)
    order: PromptSampler | CustomSampler = field(init=False)
    on_step: StepCallback | None = None
    _told_layout: bool = False

    def __post_init__(self) -> None:
        self.config, self.total_steps = self.plan.config, self.plan.steps
        self.run_dir = Path(self.config.trainer.default_local_dir)
        self.code = digest_code(self.config)
        self.idle, self.memory = IdleShares(self.roles.workers), PeakMemory(self.roles.workers)

    def restore(self, resumed: Resumed, finished: Mapping[str, Group]) -> None:
        """Set the state that the trainer had when a checkpoint was written, with its finished groups of later steps."""
        self.step = resumed.state.step
        self._stop_at(resumed.state.metrics)
        self.order.load_state_dict(resumed.state.sampler)
        self.saver.resumed_from(resumed.folder, resumed.state)

    def fit(self) -> None:
        """Train until `total_steps`, validating and saving on the way; or only validate (`trainer.val_only`).

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM, after a checkpoint was written.
        """
        raise NotImplementedError

    def validate(self) -> None:
        """Validate the model as it is."""
        raise NotImplementedError

    def only_validates(self) -> bool:
        """Validate first, where that is asked for; tells if it is all that is (`trainer.val_only`)."""
        trainer = self.config.trainer
        if trainer.val_only or (trainer.val_before_train and self.step == 0):
            self.validate()
            self._stop_at(self.validated)
            self.report()
        return trainer.val_only

    def _stop_at(self, validated: Mapping[str, float]) -> None:
        """Make this step the last one if its validation has reached `trainer.stop_at`."""
        if why := why_it_ends(self.config.trainer.stop_at, validated):
            self.total_steps = self.step
            self.progress.message(f"step {self.step} is the last one: {why}")

    @stage("save_checkpoint", counted=True)
    async def save(self) -> None:
        """Begin to write a checkpoint. Its contents are copied before this returns, and written in the background."""
        await self.saver.begin(*self.state())

    def state(self) -> tuple[RunState, list[FinishedGroups]]:
        """Return the state of the run, and the finished groups of later steps; both of the same moment."""
        state = RunState(
            step=self.step,
            weight_version=0,
            sampler=self.order.state_dict(),
            prompts=self.data.identity,
            code=self.code,
            metrics=self.validated,
            trackers=tracker_ids(self.run_dir),
        )
        return state, []

    def report(self) -> None:
        """Send the metrics of the step to the trackers and the display."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Do what follows a trained step: validation and a checkpoint where they are due, then the report."""
        if self.due(self.config.trainer.test_freq):
            self.validate()
            self._stop_at(self.validated)
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

    @blocking
    async def tell_layout(self) -> None:
        """Show once which layout of sequences each role uses; they have checked it on their first batch."""
        if self._told_layout:
            return
        self._told_layout = True
        for name, gang in self.roles.gangs.items():
            with contextlib.suppress(WorkerLost):  # the next pass notices, and replaces the worker
                self.progress.message(f"{name}: {await gang.forward_report()}")

    @property
    def trained(self) -> Gang:
        """The ranks of the model that is trained, and exported at the end."""
        return self.roles.gangs[roles_of(self.config)[0].name]

    @blocking
    async def finish(self) -> None:
        """Wait for the checkpoint, and write the trained model and how to ask it, if the config says so."""
        await self.saver.finish()
        if self.config.trainer.export_hf_model:
            self.progress.phase("export")
            checkpoint, dtype = self.saver.last if self.saver.step == self.step else None, self.config.export_dtype
            usage = exported_usage(self.plan, self.step, dtype, checkpoint, self.run_dir)
            await self.trained.export_hf_model(str(self.run_dir / EXPORTED), dtype, usage)

    @contextlib.contextmanager
    def saving_when_stopped(self) -> Iterator[None]:
        """Write a checkpoint if a signal ends what is within and there is news to keep; complete one under way."""
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
        """Tell if something done every `frequency` steps (-1: never) is due: also after the last step."""
        return frequency > 0 and (self.step % frequency == 0 or self.step == self.total_steps)

    def save_is_due(self) -> bool:
        """Tell if a checkpoint is due: by steps, by time, or because the run ends."""
        trainer = self.config.trainer
        ends = trainer.save_interval_minutes is not None and self.step == self.total_steps
        return self.due(trainer.save_freq) or self.saver.is_due or ends


def mini_batches(
    config: RunConfig, section: ActorConfig | CriticConfig, uids: np.ndarray, step: int
) -> list[np.ndarray]:
    """Row positions of each mini-batch of each epoch, after `step` steps; a group is never cut, so its responses meet
    one policy. `uids` is the group of each row; groups are one after another, and may differ in size.
    """
    uids = np.asarray(uids)
    groups = np.split(np.arange(len(uids)), np.flatnonzero(uids[1:] != uids[:-1]) + 1)
    batches: list[np.ndarray] = []
    for epoch in range(section.ppo_epochs):
        order = np.arange(len(groups))
        if section.shuffle:
            order = np.random.default_rng([config.trainer.seed, step, epoch]).permutation(order)
        parts = np.array_split(order, len(groups) // section.ppo_mini_batch_size)
        batches.extend(np.concatenate([groups[i] for i in part]) for part in parts)
    return batches


SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop")


def model_usage(plan: Plan[Any], step: int | None) -> Usage:
    """Return the prompts of a run, and how it samples in validation, with which its reported numbers were reached.

    A fine-tuned model has the template's variables alone, and a reward model nothing but its step.
    """
    config = plan.config
    if isinstance(config, RunConfig):
        sampling = plan.val_sampling
        values = {name: getattr(sampling, name) for name in SAMPLING}
        data, plain = config.data, config.data.apply_chat_template
        return Usage(step, data.system_prompt, data.apply_chat_template_kwargs, values, apply_chat_template=plain)
    if isinstance(config, SFTConfig):
        return Usage(step, apply_chat_template_kwargs=config.data.apply_chat_template_kwargs)
    return Usage(step)


def exported_usage(
    plan: Plan[Any], step: int, dtype: str, checkpoint: Path | None, run_dir: Path | None = None
) -> Usage:
    """Return what an exported model says of itself, whose weights are "fp32" or "bf16".

    Args:
        checkpoint: of that step; None: the run has written none.
        run_dir: of the run that exports it at its end; None: a command does.
    """
    digest = None if checkpoint is None else checkpoint_digest(checkpoint)
    run_id = None if run_dir is None else run_digest(run_dir)
    return replace(model_usage(plan, step), checkpoint=digest, run=run_id, dtype=dtype)
