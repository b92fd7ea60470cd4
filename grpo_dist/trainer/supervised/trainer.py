"""The loop of commands that train one model: an optimizer step for each batch of rows, with validation on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from grpo_dist.config.schema_job import SupervisedConfig
from grpo_dist.plan.plan import Plan
from grpo_dist.protocol import Metric, metric_values
from grpo_dist.runtime.event_loop import blocking
from grpo_dist.tracking.metric_names import SUPERVISED_VALIDATION, require_metrics
from grpo_dist.trainer.checkpoint.saver import CheckpointSaver
from grpo_dist.trainer.loop import TrainingLoop, stage
from grpo_dist.trainer.metrics import performance_metrics
from grpo_dist.trainer.supervised.rows import Rows, new_sampler, rank_shares
from grpo_dist.workers.supervised import SupervisedGroup


@dataclass
class SupervisedTrainer(TrainingLoop):
    """Trains one model on started ranks; `data` are the rows."""

    plan: Plan[SupervisedConfig]
    data: Rows
    config: SupervisedConfig = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = cast(SupervisedGroup, self.trained)
        self.order = new_sampler(self.config, self.data)
        self.saver = CheckpointSaver(self.config, self.roles.holders, async_save=self.config.checkpoint.async_save)

    def fit(self) -> None:
        """See `TrainingLoop.fit`."""
        with self.saver.completing(), self.saving_when_stopped():
            if self.only_validates():
                return
            while self.step < self.total_steps:
                self.timings, self.metrics, self.validated = {}, {}, {}
                self.preemption.held = True  # a signal waits from here on, until the run can be saved again
                started = time.perf_counter()
                self.train()
                self.timings["step"] = time.perf_counter() - started
                self.step += 1
                self.measure()
                self.tell_layout()
                self.end_step()
            self.finish()

    @stage("train")
    async def train(self) -> None:
        """One optimizer step on the next batch."""
        examples = [self.data.train[i] for i in self.order.next_batch()]
        self.metrics["perf/total_num_tokens"] = float(sum(example.total_tokens for example in examples))
        parts = rank_shares(examples, len(self.model.workers), self.data.kind.marks)
        self.metrics |= metric_values(await self.model.train(parts, self.data.kind.objective, self.step + 1))

    @stage("testing", counted=True)
    async def validate(self) -> None:
        """The metrics of the validation rows."""
        if not self.data.validation:
            return
        parts = rank_shares(self.data.validation, len(self.model.workers), self.data.kind.marks)
        metrics: dict[str, Metric] = await self.model.evaluate(parts, self.data.kind.objective, self.step)
        self.validated = {SUPERVISED_VALIDATION + name: value for name, value in metric_values(metrics).items()}
        require_metrics(self.config.trainer, self.validated)
        self.metrics |= self.validated

    @blocking
    async def measure(self) -> None:
        """Turn the step's timings into metrics."""
        self.metrics |= performance_metrics(self.timings, self.metrics, num_devices=self.plan.place.num_devices)
        self.metrics |= {"training/epoch": self.order.epoch} | self.idle.since_last() | self.memory.latest()

    def report(self) -> None:
        """Send the step's metrics to the trackers and the display."""
        self.metrics |= {f"timing_s/{name}": seconds for name, seconds in self.timings.items()}
        self.trackers.log(self.metrics, self.step)
        self.progress.step(self.step, self.metrics)
