"""The roles as the driver sees them: typed methods that hand handles around."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import ObjectiveSettings
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.engines.train.micro_batch_plan import Lengths
from grpo_dist.errors import GrpoDistError, WorkerLost
from grpo_dist.protocol import Mean, Metric, Sum, merge_metrics
from grpo_dist.workers.balance import balance
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.policy import PolicySettings
from grpo_dist.workers.process import Address
from grpo_dist.workers.restarts import RestartBudget

# The calls of a role's start, one list after the other; it is sent the answers to the one before.
Restart = Generator[list[Call], list[Any], None]


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
        return self.take(call, call.result())

    def take(self, call: Call, label: Label) -> DataProtoRef | None:
        """Take in what a call has answered; after the last one, a handle in the order of the batch's rows."""
        self.parts[call] = call.handle(label)
        if self.in_flight:
            return None
        parts = [self.parts[call] for call in self.calls]
        return DataProtoRef.concat(parts).reorder(np.argsort(np.concatenate(self.rows)))


class PolicyGroup:
    """Ranks that hold one sharded model: the reference, and the base of the actor."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self._settings: PolicySettings | None = None

    def submit_start(self, settings: PolicySettings) -> list[Call]:
        """Form the process group and load the model, without waiting."""
        self._settings = settings
        host = meeting_host(self.workers.call_home())
        return self._submit_start(host, self.workers.call(0, "start", "open_store", host))

    def _submit_start(self, host: str, port: int) -> list[Call]:
        return self.workers.submit_all("start", "start", self._settings, host, port)

    def submit_log_probs(self, stage: str, batch: DataProtoRef, method: str = "compute_log_probs") -> LogProbJob:
        """Compute log-probs of all rows, spread over the ranks, without waiting."""
        rows = _shares(batch, np.arange(len(batch)), len(self.workers))
        inputs = batch.select(("uid", "prompts", "responses", "response_mask"))
        parts = [inputs.reorder(part) for part in rows]
        calls = [self.workers.submit_for_data(rank, stage, method, part) for rank, part in enumerate(parts)]
        return LogProbJob(calls, rows)

    def forward_report(self) -> str:
        """One sentence on how the ranks lay sequences out, and why."""
        return self.workers.call_all("report", "forward_report")[0]

    def begin_save(self, folder: str) -> None:
        """Begin to write a checkpoint into `folder`, from a copy; waits until the copy is there."""
        self.workers.call_all("save_checkpoint", "begin_save", folder)

    def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """The files of that checkpoint by name; None while a rank still writes, unless `wait`.

        Raises:
            CheckpointError: a rank cannot write.
        """
        parts = self.workers.call_all("save_checkpoint", "finished_save", wait)
        return None if None in parts else {name: digest for part in parts for name, digest in part.items()}

    def load_checkpoint(self, folder: str) -> None:
        """Read a checkpoint."""
        self.workers.call_all("load_checkpoint", "load_checkpoint", folder)

    def collect_log_probs(self, job: LogProbJob) -> DataProtoRef:
        """Wait for a job; one handle in the order of the batch's rows."""
        merged = None
        for call, label in zip(job.calls, self.workers.gather(job.calls), strict=True):
            merged = job.take(call, label)
        assert merged is not None, "the last call completes it"
        return merged


class ReferenceGroup(PolicyGroup):
    """The reference of the KL term. It moves only when told to (iterative GRPO).

    Attributes:
        has_moved: whether it is another model than the one it was loaded from: then only a checkpoint has its weights.

    Args:
        workers: its processes.
        restarts: how many may be replaced.
    """

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        super().__init__(workers)
        self.restarts = restarts or RestartBudget()
        self.has_moved = False

    def restart(self, error: GrpoDistError) -> Restart:
        """Replace all ranks: those that are left cannot go on without the one that is lost. A generator of the calls
        to wait for, one after the other; it is sent their answers.

        Raises:
            GrpoDistError: `error`, if it is no loss, there have been too many, or the reference has moved: then only a
                checkpoint has its weights.
        """
        if not isinstance(error, WorkerLost) or self.has_moved:
            raise error
        self.restarts.spend(error)
        for rank in range(len(self.workers)):
            self.workers.respawn(rank)
        addresses = yield self.workers.submit_all("start", "address")
        host = meeting_host(self.workers.note_addresses(addresses))
        (port,) = yield [self.workers.submit(0, "start", "open_store", host)]
        yield self._submit_start(host, port)

    def move_towards(self, actor: ActorGroup, share: float) -> None:
        """Take `share` of the actor's weights, and the rest of its own."""
        self.has_moved = True
        buckets = actor.workers.call_all("sync_reference", "export_parameters")[0]
        self.workers.call_all("sync_reference", "load_weights", buckets, share)

    def load_checkpoint(self, folder: str) -> None:
        """Read a checkpoint. From then on only a checkpoint has the weights."""
        self.has_moved = True
        super().load_checkpoint(folder)


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
        calls = [self.workers.submit_for_data(rank, "update", "update", *a) for rank, a in enumerate(arguments)]
        results = self.workers.gather(calls)
        merged = [merge_metrics(parts) for parts in zip(*(metrics for metrics, _ in results), strict=True)]
        if objective.on_policy:
            labels = [label for _, label in results]
            old = DataProtoRef.concat([c.handle(la) for c, la in zip(calls, labels, strict=True)])
            batch = batch.union(old.reorder(np.argsort(np.concatenate(shares[0]))))
        return batch, merge_metrics([_per_mini_batch(metrics) for metrics in merged])

    def export_hf_model(self, folder: str, dtype: str) -> None:
        """Write the policy as a Hugging Face folder, with weights in `dtype`: "fp32" or "bf16"."""
        self.workers.call_all("export_hf_model", "export_hf_model", folder, dtype)


def find_model(groups: Sequence[WorkerGroup], path: str) -> None:
    """Have one process of each node find the model, or download it: the other processes then find it there.

    Raises:
        GrpoDistError: a node has it not and cannot get it; the message names the node.
    """
    first: dict[str, tuple[WorkerGroup, int]] = {}
    for group in groups:
        for rank, address in enumerate(group.call_home()):
            first.setdefault(address.node_id, (group, rank))
    calls = [group.submit(rank, "start", "find_model", path) for group, rank in first.values()]
    groups[0].gather(calls)


def meeting_host(addresses: Sequence[Address]) -> str:
    """Where ranks meet: at the first one's node, on loopback if all are there."""
    return LOOPBACK if len({address.ip for address in addresses}) == 1 else addresses[0].ip


def _shares(batch: DataProtoRef, rows: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Which of `rows` each rank works on."""
    columns = (batch[name][rows] for name in ("uid", "prompt_length", "response_length"))
    return [rows[part] for part in balance(Lengths(*columns), num_ranks)]


def _per_mini_batch(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """A mini-batch's loss is a sum over ranks; over mini-batches its mean is reported."""
    return {name: Mean(m.value, 1) if isinstance(m, Sum) else m for name, m in metrics.items()}
