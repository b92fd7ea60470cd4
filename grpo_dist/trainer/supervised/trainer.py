"""The loop of commands that train one model: an optimizer step for each batch of rows, with validation on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from grpo_dist.config.schema_supervised import SupervisedConfig
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.protocol import Metric, metric_values
from grpo_dist.tracking.base import Trackers, tracker_ids
from grpo_dist.tracking.console import Progress
from grpo_dist.tracking.metric_names import SUPERVISED_VALIDATION, require_metric
from grpo_dist.trainer.checkpoint.config_changes import digest_code
from grpo_dist.trainer.checkpoint.folder import RunState
from grpo_dist.trainer.checkpoint.saver import CheckpointSaver
from grpo_dist.trainer.loop import TrainingLoop
from grpo_dist.trainer.metrics import IdleShares, PeakMemory
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.stage import stage
from grpo_dist.trainer.supervised.rows import Rows
from grpo_dist.workers.event_loop import blocking
from grpo_dist.workers.supervised import SupervisedGroup


@dataclass
class SupervisedTrainer(TrainingLoop):
    """Trains one model on started workers.

    Attributes:
        config: the whole run's config.
        model: the ranks.
        rows: what it trains and validates on.
        sampler: the order of the rows.
        total_steps: training steps of the run.
        saver: writes checkpoints.
        trackers: where metrics go.
        progress: the display at the terminal.
        preemption: whether a signal has come to end the run.
        step: the last step that is trained.
    """

    config: SupervisedConfig
    model: SupervisedGroup
    rows: Rows
    sampler: PromptSampler
    total_steps: int
    saver: CheckpointSaver
    trackers: Trackers
    progress: Progress
    preemption: Preemption
    step: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    _told_layout: bool = False

    def __post_init__(self) -> None:
        self.run_dir = Path(self.config.trainer.default_local_dir)
        self.identity, self.code = self.rows.identity, digest_code(self.config)
        workers = [self.model.workers]
        self.idle, self.memory = IdleShares(workers), PeakMemory(workers)

    def fit(self) -> None:
        """Train until `total_steps`, validating and saving on the way; or only validate (`trainer.val_only`).

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM, after a checkpoint was written.
        """
        with self.saver.completing(), self.saving_when_stopped():
            if self.config.trainer.val_only or (self.config.trainer.val_before_train and self.step == 0):
                self.validate()
                self.report()
            if self.config.trainer.val_only:
                return
            while self.step < self.total_steps:
                self.timings, self.metrics, self.validated = {}, {}, {}
                self.preemption.hold()  # a signal waits from here on, until the run can be saved again
                started = time.perf_counter()
                self.train()
                self.timings["step"] = time.perf_counter() - started
                self.step += 1
                self.measure()
                self.end_step()
            self.finish()

    @stage("train")
    async def train(self) -> None:
        """One optimizer step on the next batch."""
        examples = [self.rows.train[i] for i in self.sampler.next_batch()]
        self.metrics["perf/total_num_tokens"] = float(sum(each.total_tokens for each in examples))
        parts = self.rows.shares(examples, len(self.model.workers))
        self.metrics |= metric_values(await self.model.train(parts, self.rows.objective, self.step + 1))

    @stage("testing", counted=True)
    async def validate(self) -> None:
        """The metrics of the validation rows."""
        if not self.rows.validation:
            return
        parts = self.rows.shares(self.rows.validation, len(self.model.workers))
        found: dict[str, Metric] = await self.model.evaluate(parts, self.rows.objective, self.step)
        self.validated = {SUPERVISED_VALIDATION + name: value for name, value in metric_values(found).items()}
        require_metric(self.config.trainer.keep_best_metric, self.validated)
        self.metrics |= self.validated

    @stage("save_checkpoint", counted=True)
    async def save(self) -> None:
        """Begin to write a checkpoint. Its contents are copied before this returns, and written in the background."""
        state = RunState(
            step=self.step,
            weight_version=0,
            sampler=self.sampler.state_dict(),
            prompts=self.identity,
            code=self.code,
            metrics=self.validated,
            trackers=tracker_ids(self.run_dir),
        )
        await self.saver.begin(state)

    @blocking
    async def measure(self) -> None:
        """Turn the step's timings into metrics, and show once how the ranks lay out sequences."""
        seconds, tokens = self.timings["step"], self.metrics["perf/total_num_tokens"]
        devices = self.config.world_size if self.config.num_gpus else self.config.trainer.nnodes
        self.metrics |= {
            "perf/time_per_step": seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/throughput": tokens / seconds / devices,
            "training/epoch": self.sampler.epoch,
            **self.idle.since_last(),
            **self.memory.latest(),
        }
        if not self._told_layout:
            self._told_layout = True
            self.progress.message(f"{self.model.workers.role}: {await self.model.forward_report()}")

    def report(self) -> None:
        """Send the step's metrics to the trackers and the display."""
        self.metrics |= {f"timing_s/{name}": seconds for name, seconds in self.timings.items()}
        self.trackers.log(self.metrics, self.step)
        self.progress.step(self.step, self.metrics)

    @blocking
    async def finish(self) -> None:
        """Wait for the checkpoint, and write the trained model."""
        await self.saver.finish()
        await self.export(self.model, self.config.export_dtype)
