"""The gangs: roles whose ranks hold one sharded model and answer together.

With one rank lost the others cannot go on. All are started again where that makes the loss good (`Gang.restart`), and
what they were asked is asked again. Where only a checkpoint has what they held, the loss is the run's (trainer/run.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import ObjectiveSettings
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.engines.train.micro_batch_plan import Lengths
from grpo_dist.errors import GrpoDistError, WorkerError, WorkerLost
from grpo_dist.protocol import Mean, Metric, Sum, merge_metrics
from grpo_dist.workers.balance import balance
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.policy import PolicySettings
from grpo_dist.workers.process import Address
from grpo_dist.workers.restarts import RestartBudget


class Gang:
    """Ranks that hold one sharded model: the base of the reference and the actor.

    Args:
        workers: their processes.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self._settings: PolicySettings | None = None
        self._free = asyncio.Lock()  # one pass at a time, so that the time limit of a pass is its own

    async def start(self, settings: PolicySettings) -> None:
        """Form the process group and load the model."""
        self._settings = settings
        host = meeting_host(await self.workers.call_home())
        port = await self.workers.ask(0, "start", "open_store", host)
        await self.workers.ask_all("start", "start", settings, host, port)

    async def restart(self, error: GrpoDistError) -> None:
        """Make the loss of a rank good.

        Raises:
            GrpoDistError: `error`, if that cannot be done.
        """
        raise error

    async def compute_log_probs(
        self, stage: str, batch: DataProtoRef, method: str = "compute_log_probs"
    ) -> DataProtoRef:
        """Log-probs of all rows, spread over the ranks; a handle in the order of the batch's rows."""
        rows = _shares(batch, np.arange(len(batch)), len(self.workers))
        inputs = batch.select(("uid", "prompts", "responses", "response_mask"))
        parts = [inputs.reorder(part) for part in rows]

        def send() -> list[Call]:
            return [self.workers.submit_for_data(rank, stage, method, part) for rank, part in enumerate(parts)]

        async with self._free:
            calls, labels = await self._ask(send)
        handles = [call.handle(label) for call, label in zip(calls, labels, strict=True)]
        return DataProtoRef.concat(handles).reorder(np.argsort(np.concatenate(rows)))

    async def _ask(self, send: Callable[[], list[Call]]) -> tuple[list[Call], list[Any]]:
        """Ask all ranks, and again after a loss that could be made good: (the calls, their answers)."""
        while True:
            calls = send()
            try:
                return calls, await self.workers.answers(calls)
            except WorkerError as error:
                await self.restart(error)

    async def forward_report(self) -> str:
        """One sentence on how the ranks lay sequences out, and why."""
        return (await self.workers.ask_all("report", "forward_report"))[0]

    async def begin_save(self, folder: str) -> None:
        """Begin to write a checkpoint into `folder`, from a copy; waits until the copy is there."""
        await self.workers.ask_all("save_checkpoint", "begin_save", folder)

    async def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """The files of that checkpoint by name; None while a rank still writes, unless `wait`.

        Raises:
            CheckpointError: a rank cannot write.
        """
        parts = await self.workers.ask_all("save_checkpoint", "finished_save", wait)
        return None if None in parts else {name: digest for part in parts for name, digest in part.items()}

    async def load_checkpoint(self, folder: str) -> None:
        """Read a checkpoint."""
        await self.workers.ask_all("load_checkpoint", "load_checkpoint", folder)


class ReferenceGroup(Gang):
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

    async def restart(self, error: GrpoDistError) -> None:
        """Start all ranks again: those that are left cannot go on without the one that is lost.

        Raises:
            GrpoDistError: `error`, if it is no loss, there have been too many, or the reference has moved: then only a
                checkpoint has its weights.
        """
        while True:
            if not isinstance(error, WorkerLost) or self.has_moved:
                raise error
            self.restarts.spend(error)
            for rank in range(len(self.workers)):
                self.workers.respawn(rank)
            assert self._settings is not None, "it was started before"
            try:
                return await self.start(self._settings)
            except WorkerError as another:
                error = another

    async def move_towards(self, actor: ActorGroup, share: float) -> None:
        """Take `share` of the actor's weights, and the rest of its own."""
        self.has_moved = True
        buckets = (await actor.workers.ask_all("sync_reference", "export_parameters"))[0]
        await self.workers.ask_all("sync_reference", "load_weights", buckets, share)

    async def load_checkpoint(self, folder: str) -> None:
        """Read a checkpoint. From then on only a checkpoint has the weights."""
        self.has_moved = True
        await super().load_checkpoint(folder)


class ActorGroup(Gang):
    """The policy that trains."""

    async def take_reference_head(self, ref: ReferenceGroup) -> None:
        """Copy the reference's present output layer, for the exact KL."""
        head = (await ref.workers.ask_all("sync_reference", "export_output_layer"))[0]
        await self.workers.ask_all("sync_reference", "load_reference_head", head)

    async def update(
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
        async with self._free:
            calls = [self.workers.submit_for_data(rank, "update", "update", *a) for rank, a in enumerate(arguments)]
            results = await self.workers.answers(calls)
        merged = [merge_metrics(parts) for parts in zip(*(metrics for metrics, _ in results), strict=True)]
        if objective.on_policy:
            labels = [label for _, label in results]
            old = DataProtoRef.concat([c.handle(la) for c, la in zip(calls, labels, strict=True)])
            batch = batch.union(old.reorder(np.argsort(np.concatenate(shares[0]))))
        return batch, merge_metrics([_per_mini_batch(metrics) for metrics in merged])

    async def export_hf_model(self, folder: str, dtype: str) -> None:
        """Write the policy as a Hugging Face folder, with weights in `dtype`: "fp32" or "bf16"."""
        await self.workers.ask_all("export_hf_model", "export_hf_model", folder, dtype)


async def find_model(groups: Sequence[WorkerGroup], path: str) -> None:
    """Have one process of each node find the model, or download it: the other processes then find it there.

    Raises:
        GrpoDistError: a node has it not and cannot get it; the message names the node.
    """
    first: dict[str, tuple[WorkerGroup, int]] = {}
    for group in groups:
        for rank, address in enumerate(await group.call_home()):
            first.setdefault(address.node_id, (group, rank))
    await asyncio.gather(*(group.ask(rank, "start", "find_model", path) for group, rank in first.values()))


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
