"""The reward processes as the driver sees them: who is free, who is being replaced.

A process that is lost is ended and started again, as often as the budget allows; what it was asked for is asked of
another one, or of the new one. A mistake of the reward function is not that: it is shown (rewards/scorer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.errors import WorkerLost
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.batch_work import SAMPLE_COLUMNS, TARGET_COLUMNS
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import RewardSettings, Task

MOST_PRINTED = 10  # lines that the reward function prints, in one step


@dataclass(frozen=True)
class Writing:
    """Something that a process writes meanwhile: its call, and how to ask another one."""

    call: Call
    ask: Callable[[int], Call]


class RewardPool:
    """The reward processes. Each scores one group at a time, so that the time limit of a call is its own.

    Args:
        workers: their processes.
        restarts: how many may be replaced.
    """

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        self.workers, self.restarts = workers, restarts or RestartBudget()
        self._settings: RewardSettings | None = None
        self._free = list(range(len(workers)))
        self._starting: dict[int, Call] = {}
        self._printed: list[str] = []
        self._num_more_printed = 0

    def submit_start(self, settings: RewardSettings) -> list[Call]:
        """Load tokenizers and reward functions, without waiting."""
        self._settings = settings
        self.workers.call_home()
        return self.workers.submit_all("start", "start", settings)

    # --- scores ------------------------------------------------------------------------------------------------
    @property
    def has_free(self) -> bool:
        """Whether a process waits for work."""
        return bool(self._free)

    @property
    def starting(self) -> list[Call]:
        """The starts of processes that were replaced."""
        return list(self._starting.values())

    def submit(self, group: DataProtoRef, task: Task) -> Call:
        """Score one group on a free process, without waiting."""
        inputs = group.select(("responses", "response_mask"))
        return self.workers.submit_for_data(self._free.pop(0), "score", "score", inputs, task)

    def collect(self, call: Call) -> tuple[DataProtoRef, list[str]] | None:
        """Take in a finished call.

        Returns:
            The handle of the group's scores, and why responses of it could not be scored. None if there are none: the
            process is being replaced and another one must be asked; or the call was a process's start.

        Raises:
            GrpoDistError: a mistake that another process would make too, or too many were lost.
        """
        is_start = self._starting.get(call.rank) is call
        try:
            answer = call.result()
        except WorkerLost as error:
            self.replace(call, error)
            return None
        if call.process is self.workers.handles[call.rank]:  # else the new process says when it is free
            self._free.append(call.rank)
        if is_start:
            del self._starting[call.rank]
            return None
        label, failures, (lines, num_more) = answer
        self._note_printed(lines, num_more)
        return call.handle(label), failures

    def take_printed(self) -> list[str]:
        """The first lines that the reward function has printed since the last time, and how many more came."""
        more = [f"... and {self._num_more_printed} more lines"] if self._num_more_printed else []
        lines = self._printed + more
        self._printed, self._num_more_printed = [], 0
        return lines

    def _note_printed(self, lines: list[str], num_more: int) -> None:
        room = MOST_PRINTED - len(self._printed)
        self._printed += lines[:room]
        self._num_more_printed += num_more + len(lines[room:])

    def replace(self, call: Call, error: WorkerLost) -> None:
        """End the process that a call was asked of and start it again, unless that has happened already.

        Raises:
            WorkerLost: `error`, if too many workers were lost.
        """
        if call.process is not self.workers.handles[call.rank]:
            return
        self.restarts.spend(error)
        self._free = [rank for rank in self._free if rank != call.rank]
        self.workers.respawn(call.rank)
        self._starting[call.rank] = self.workers.submit(call.rank, "start", "start", self._settings)

    # --- whole batches -----------------------------------------------------------------------------------------
    def compute_targets(
        self, batch: DataProtoRef, settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[DataProtoRef, dict[str, float]]:
        """What the update trains on, from the whole batch; and metrics."""
        inputs = batch.select(("uid", *TARGET_COLUMNS, *settings.columns))

        def ask(rank: int) -> Call:
            arguments = (inputs, settings, kl_coef, seed)
            return self.workers.submit_for_data(rank, "targets", "compute_targets", *arguments)

        call, (label, metrics) = self._answer(ask)
        return call.handle(label), metrics

    def rollout_diagnostics(self, batch: DataProtoRef, correction: Mapping[str, Any]) -> dict[str, float]:
        """How far the sampler and the policy are apart, and what the correction's weights are."""
        inputs = batch.select(("response_mask", "rollout_log_probs", "old_log_probs"))
        name = "rollout_diagnostics"
        return self._answer(lambda rank: self.workers.submit(rank, name, name, inputs, correction))[1]

    def read_samples(self, batch: DataProtoRef, step: int, ground_truths: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The batch as text, one dict per row; for the few rows that are shown."""
        arguments = batch.select(SAMPLE_COLUMNS), step, ground_truths
        return self._answer(lambda rank: self.workers.submit(rank, "read_samples", "read_samples", *arguments))[1]

    def write_samples(self, batch: DataProtoRef, path: str, step: int, ground_truths: Mapping[str, Any]) -> Writing:
        """Write the batch down as text, without waiting."""
        arguments = batch.select(SAMPLE_COLUMNS), path, step, ground_truths
        return self._write("write_samples", "write_samples", *arguments)

    def write_groups(self, groups: DataProtoRef, path: str) -> Writing:
        """Write scored groups into a checkpoint, as `path` with several endings, without waiting."""
        return self._write("save_checkpoint", "write_groups", groups, path)

    def finish(self, writing: Writing) -> Any:
        """Wait until it is written; what the process says of it."""
        return self._answer(writing.ask, writing.call)[1]

    def read_groups(self, path: str, small: Sequence[str]) -> tuple[dict[str, np.ndarray], ray.ObjectRef]:
        """What was written there: the columns named in `small`, and all of it in the object store."""

        def ask(rank: int) -> Call:
            return self.workers.submit_for_data(rank, "load_checkpoint", "read_groups", path, list(small))

        call, columns = self._answer(ask)
        assert call.data is not None
        return columns, call.data

    def _write(self, stage: str, method: str, *arguments: Any) -> Writing:
        # it is collected a step later, so the clock must not run
        def ask(rank: int) -> Call:
            return self.workers.submit(rank, stage, method, *arguments, timed=False)

        return Writing(ask(self._idle()), ask)

    def _answer(self, ask: Callable[[int], Call], call: Call | None = None) -> tuple[Call, Any]:
        """Ask a process, or wait for one that was asked; another one if it is lost. (The call, its answer.)"""
        while True:
            call = ask(self._idle()) if call is None else call
            try:
                return call, self.workers.gather([call])[0]
            except WorkerLost as error:
                self.replace(call, error)
                call = None

    def _idle(self) -> int:
        """A process that does not score now, if there is one: whole batches must not wait for one group's scores.
        What is asked of one that starts is answered after that.
        """
        if self._free:
            return self._free[0]
        return next((rank for rank in range(len(self.workers)) if rank not in self._starting), 0)
