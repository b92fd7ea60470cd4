"""The roles as the driver sees them: typed methods that hand handles around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.engines.micro_batch_plan import Lengths
from grpo_dist.engines.settings import ObjectiveSettings
from grpo_dist.protocol import Mean, Metric, Sum, merge_metrics
from grpo_dist.workers.balance import balance
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.policy import PolicySettings
from grpo_dist.workers.reward import SAMPLE_COLUMNS, TARGET_COLUMNS, RewardSettings, Task

LOOPBACK = "127.0.0.1"
MOST_PRINTED = 10  # lines that the reward function prints, in one step


@dataclass
class LogProbJob:
    """Log-probs being computed: one call per rank, and the rows that each rank works on."""

    calls: list[Call]
    rows: list[np.ndarray]
    parts: dict[Call, DataProtoRef] = field(default_factory=dict)

    @property
    def in_flight(self) -> list[Call]:
        """The calls that have not been collected."""
        return [call for call in self.calls if call not in self.parts]

    def collect(self, call: Call) -> DataProtoRef | None:
        """Take in a finished call; after the last one, a handle in the order of the batch's rows."""
        self.parts[call] = call.result()
        return None if self.in_flight else self.merged()

    def merged(self) -> DataProtoRef:
        """One handle in the order of the batch's rows."""
        parts = [self.parts[call] for call in self.calls]
        return DataProtoRef.concat(parts).reorder(np.argsort(np.concatenate(self.rows)))


class PolicyGroup:
    """Ranks that hold one sharded model: the reference, and the base of the actor."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers

    def submit_start(self, settings: PolicySettings) -> list[Call]:
        """Form the process group and load the model, without waiting."""
        addresses = self.workers.call_all("start", "address")
        self.workers.nodes = [address.host for address in addresses]
        one_node = len({address.ip for address in addresses}) == 1
        master = addresses[0]
        return self.workers.submit_all("start", "start", settings, LOOPBACK if one_node else master.ip, master.port)

    def submit_log_probs(self, stage: str, batch: DataProtoRef, method: str = "compute_log_probs") -> LogProbJob:
        """Compute log-probs of all rows, spread over the ranks, without waiting."""
        rows = _shares(batch, np.arange(len(batch)), len(self.workers))
        inputs = batch.select(("uid", "prompts", "responses", "response_mask"))
        calls = [self.workers.submit(rank, stage, method, inputs.reorder(part)) for rank, part in enumerate(rows)]
        return LogProbJob(calls, rows)

    def forward_report(self) -> str:
        """One sentence on how the ranks lay sequences out, and why."""
        return self.workers.call_all("report", "forward_report")[0]

    def collect_log_probs(self, job: LogProbJob) -> DataProtoRef:
        """Wait for a job; one handle in the order of the batch's rows."""
        job.parts = dict(zip(job.calls, self.workers.gather(job.calls), strict=True))
        return job.merged()


class ReferenceGroup(PolicyGroup):
    """The reference of the KL term. It moves only when told to (iterative GRPO)."""

    def move_towards(self, actor: ActorGroup, share: float) -> None:
        """Take `share` of the actor's weights, and the rest of its own."""
        buckets = actor.workers.call_all("sync_reference", "export_weights", "float32")[0]
        self.workers.call_all("sync_reference", "load_weights", buckets, share)

    def save_checkpoint(self, folder: str) -> None:
        """Write the weights."""
        self.workers.call_all("save_checkpoint", "save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> None:
        """Read the weights."""
        self.workers.call_all("load_checkpoint", "load_checkpoint", folder)


class ActorGroup(PolicyGroup):
    """The policy that trains."""

    def take_reference_head(self, ref: ReferenceGroup) -> None:
        """Copy the reference's present output layer, for the exact KL."""
        head = ref.workers.call_all("sync_reference", "export_output_layer")[0]
        self.workers.call_all("sync_reference", "load_reference_head", head)

    def update(
        self, batch: DataProtoRef, mini_batches: Sequence[np.ndarray], objective: ObjectiveSettings, step: int
    ) -> tuple[DataProtoRef, dict[str, Metric]]:
        """One optimizer step per mini-batch (arrays of row positions), each spread over the ranks.

        Returns:
            (the batch, on policy with the `old_log_probs` of the update itself; metrics, merged over ranks, then
            averaged over mini-batches).
        """
        ranks = len(self.workers)
        shares = [_shares(batch, rows, ranks) for rows in mini_batches]
        arguments = []
        for rank in range(ranks):
            own = np.unique(np.concatenate([share[rank] for share in shares]))
            positions = [np.searchsorted(own, share[rank]) for share in shares]
            arguments.append((batch.reorder(own), positions, objective, step))
        results = self.workers.call_each("update", "update", arguments)
        merged = [merge_metrics(parts) for parts in zip(*(metrics for metrics, _ in results), strict=True)]
        if objective.on_policy:
            old = DataProtoRef.concat([log_probs for _, log_probs in results])
            batch = batch.union(old.reorder(np.argsort(np.concatenate(shares[0]))))
        return batch, merge_metrics([_per_mini_batch(metrics) for metrics in merged])

    def save_checkpoint(self, folder: str) -> None:
        """Write model, optimizer and schedule."""
        self.workers.call_all("save_checkpoint", "save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> None:
        """Read model, optimizer and schedule."""
        self.workers.call_all("load_checkpoint", "load_checkpoint", folder)

    def export_hf_model(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder."""
        self.workers.call_all("export_hf_model", "export_hf_model", folder)


class RewardPool:
    """The reward processes. Each scores one group at a time, so that the time limit of a call is its own."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self._free = list(range(len(workers)))
        self._printed: list[str] = []
        self._num_more_printed = 0

    def submit_start(self, settings: RewardSettings) -> list[Call]:
        """Load tokenizers and reward functions, without waiting."""
        self.workers.nodes = [address.host for address in self.workers.call_all("start", "address")]
        return self.workers.submit_all("start", "start", settings)

    @property
    def has_free(self) -> bool:
        """Whether a process waits for work."""
        return bool(self._free)

    def submit(self, group: DataProtoRef, task: Task) -> Call:
        """Score one group on a free process, without waiting."""
        return self.workers.submit(
            self._free.pop(0), "score", "score", group.select(("responses", "response_mask")), task
        )

    def collect(self, call: Call) -> tuple[DataProtoRef, list[str]]:
        """The handle of a finished group's scores, and why responses of it could not be scored."""
        self._free.append(call.rank)
        scores, failures, (lines, num_more) = call.result()
        room = MOST_PRINTED - len(self._printed)
        self._printed += lines[:room]
        self._num_more_printed += num_more + len(lines[room:])
        return scores, failures

    def take_printed(self) -> list[str]:
        """The first lines that the reward function has printed since the last time, and how many more came."""
        more = [f"... and {self._num_more_printed} more lines"] if self._num_more_printed else []
        lines = self._printed + more
        self._printed, self._num_more_printed = [], 0
        return lines

    def _idle(self) -> int:
        """A process that does not score now, if there is one: whole batches must not wait for one group's scores."""
        return self._free[0] if self._free else 0

    def compute_targets(
        self, batch: DataProtoRef, settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[DataProtoRef, dict[str, float]]:
        """What the update trains on, from the whole batch; and metrics."""
        inputs = batch.select(("uid", *TARGET_COLUMNS, *settings.columns))
        return self.workers.call(self._idle(), "targets", "compute_targets", inputs, settings, kl_coef, seed)

    def rollout_diagnostics(self, batch: DataProtoRef, correction: Mapping[str, Any]) -> dict[str, float]:
        """How far the sampler and the policy are apart, and what the correction's weights are."""
        inputs = batch.select(("response_mask", "rollout_log_probs", "old_log_probs"))
        return self.workers.call(self._idle(), "rollout_diagnostics", "rollout_diagnostics", inputs, correction)

    def read_samples(self, batch: DataProtoRef, step: int, ground_truths: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The batch as text, one dict per row; for the few rows that are shown."""
        inputs = batch.select(SAMPLE_COLUMNS)
        return self.workers.call(self._idle(), "read_samples", "read_samples", inputs, step, ground_truths)

    def submit_samples(self, batch: DataProtoRef, path: str, step: int, ground_truths: Mapping[str, Any]) -> Call:
        """Write the batch down as text, without waiting. It is collected a step later, so the clock must not run."""
        inputs = batch.select(SAMPLE_COLUMNS)
        return self.workers.submit(
            self._idle(), "write_samples", "write_samples", inputs, path, step, ground_truths, timed=False
        )


def _shares(batch: DataProtoRef, rows: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Which of `rows` each rank works on."""
    columns = (batch[name][rows] for name in ("uid", "prompt_length", "response_length"))
    return [rows[part] for part in balance(Lengths(*columns), num_ranks)]


def _per_mini_batch(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """A mini-batch's loss is a sum over ranks; over mini-batches its mean is reported."""
    return {name: Mean(m.value, 1) if isinstance(m, Sum) else m for name, m in metrics.items()}
