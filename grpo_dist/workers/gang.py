"""Gangs: roles whose ranks hold one sharded model and run every call together.

If one rank is lost, the others cannot continue. If the model can be loaded again, all ranks are restarted and the call
is repeated (`Gang.restart`). If only a checkpoint has the weights, the whole run starts again from it (training.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.base import SEQUENCE_COLUMNS
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import RankSettings
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.engines.train.micro_batch_plan import Lengths, balance
from grpo_dist.errors import GrpoDistError, WorkerError, WorkerLost
from grpo_dist.protocol import Mean, Metric, Sum, merge_metrics
from grpo_dist.protocol.routes import with_routes
from grpo_dist.protocol.teacher_prompts import TEACHER_PROMPTS
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget

T = TypeVar("T")


class Gang:
    """Ranks that hold one sharded model: the base of models that train and of those that do not.

    Attributes:
        has_moved: whether its weights differ from those of the model folder; then only a checkpoint has them.
    """

    has_moved = True

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self._settings: RankSettings | None = None
        self._free = asyncio.Lock()  # one pass at a time: a queued pass would use up its time limit while waiting

    async def start(self, settings: RankSettings) -> None:
        """Form the process group and load the model."""
        self._settings = settings
        addresses = await self.workers.call_home()
        host = LOOPBACK if len({address.ip for address in addresses}) == 1 else addresses[0].ip
        port = await self.workers.ask(0, "start", "open_store", host)
        await self.workers.ask_all("start", "start", settings, host, port)

    async def restart(self, error: GrpoDistError) -> None:
        """Start all ranks again after one was lost.

        Raises:
            GrpoDistError: `error`, if a restart cannot recover the weights.
        """
        raise error

    async def compute_log_probs(
        self, stage: str, batch: DataProtoRef, method: str = "compute_log_probs", *arguments: Any
    ) -> DataProtoRef:
        """Log-probs of all rows, computed by all ranks; returns a handle with rows in the order of the batch."""
        shown = {TEACHER_PROMPTS}.intersection(batch.columns if stage == "ref_log_prob" else ())
        names = with_routes((*SEQUENCE_COLUMNS, *shown, "uid"), batch.columns)
        rows, parts = self._parts(batch, names)

        def send() -> list[Call]:
            by_rank = enumerate(self._to_ranks(parts))
            return [self.workers.submit_for_data(rank, stage, method, part, *arguments) for rank, part in by_rank]

        async with self._free:
            calls, labels = await self._ask(send)
        handles = [call.handle(label) for call, label in self._of_groups(list(zip(calls, labels, strict=True)))]
        return DataProtoRef.concat(handles).reorder(np.argsort(np.concatenate(rows)))

    def _parts(self, batch: DataProtoRef, columns: Sequence[str]) -> tuple[list[np.ndarray], list[DataProtoRef]]:
        rows = _shares(batch, np.arange(len(batch)), len(self.workers) // self._group_size)
        inputs = batch.select(columns)
        return rows, [inputs.reorder(part) for part in rows]

    @property
    def _group_size(self) -> int:
        """Ranks that split sequences, and so work on the same rows: consecutive ones."""
        return 1 if self._settings is None else self._settings.model.sequence_parallel_size

    def _to_ranks(self, parts: Sequence[T]) -> list[T]:
        return [part for part in parts for _ in range(self._group_size)]

    def _of_groups(self, answers: Sequence[T]) -> Sequence[T]:
        """Return the answer of each group's first rank: the others have the same."""
        return answers[:: self._group_size]

    async def _ask(self, send: Callable[[], list[Call]]) -> tuple[list[Call], list[Any]]:
        """Send a call to all ranks, again after each successful restart: (the calls, their answers)."""
        while True:
            calls = send()
            try:
                return calls, await self.workers.answers(calls)
            except WorkerError as error:
                await self.restart(error)

    async def forward_report(self) -> str:
        """One sentence on how the ranks batch sequences (packed or padded), and why."""
        return (await self.workers.ask_all("report", "forward_report"))[0]

    async def checkpoint_bytes(self) -> int:
        """Bytes of all tensors that the ranks together write into a checkpoint."""
        return int(await self.workers.ask(0, "save_checkpoint", "checkpoint_bytes"))

    async def begin_save(self, folder: str) -> None:
        """Start writing a checkpoint into `folder` in the background; returns once the state has been copied."""
        await self.workers.ask_all("save_checkpoint", "begin_save", folder)

    async def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """The files of that checkpoint by name; None while a rank is still writing, unless `wait` is set.

        Raises:
            CheckpointError: a rank cannot write.
        """
        parts = await self.workers.ask_all("save_checkpoint", "finished_save", wait)
        return None if None in parts else {name: digest for part in parts for name, digest in part.items()}

    async def load_checkpoint(self, folder: str) -> None:
        """Load a checkpoint on all ranks."""
        await self.workers.ask_all("load_checkpoint", "load_checkpoint", folder)

    async def export_hf_model(self, folder: str, dtype: str, usage: Usage) -> None:
        """Write the model into `folder` in Hugging Face format, with weights in `dtype`: "fp32" or "bf16"."""
        await self.workers.ask_all("export_hf_model", "export_hf_model", folder, dtype, usage)


class FrozenGroup(Gang):
    """A model that is as its folder has it, at least at first: the base of the reference and the reward model."""

    has_moved = False

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        super().__init__(workers)
        self.restarts = restarts or RestartBudget()

    async def restart(self, error: GrpoDistError) -> None:
        """Start all ranks again after one was lost.

        Raises:
            GrpoDistError: `error`, if no process was lost, the restarts are used up, or the weights have moved, so that
                only a checkpoint has them; another one, if a machine was lost and no other one has room.
        """
        while True:
            if not isinstance(error, WorkerLost) or self.has_moved:
                raise error
            await self.restarts.judge(error, self.workers.node_id(error.rank))
            for rank in range(len(self.workers)):
                self.workers.retire(rank)
            await self.restarts.nodes.wait_for_room(self.workers.role, self.workers.bundles)
            for rank in range(len(self.workers)):
                self.workers.respawn(rank)
            assert self._settings is not None, "it was started before"
            try:
                return await self.start(self._settings)
            except WorkerError as another:
                error = another

    async def load_checkpoint(self, folder: str) -> None:
        """Load a checkpoint on all ranks. From then on only a checkpoint has the weights."""
        self.has_moved = True
        await super().load_checkpoint(folder)


class ReferenceGroup(FrozenGroup):
    """The reference model of the KL term: the policy's start, or a teacher. Its weights change only in iterative GRPO
    (`move_towards`).
    """

    async def move_towards(self, actor: ActorGroup, share: float) -> None:
        """Move the weights towards the actor's: share * actor + (1 - share) * reference."""
        self.has_moved = True
        buckets = (await actor.workers.ask_all("sync_reference", "export_parameters"))[0]
        await self.workers.ask_all("sync_reference", "load_weights", buckets, share)


class TrainedGroup(Gang):
    """A model that trains on responses: the critic, and the base of the actor."""

    update_stage = "update_critic"  # the name of its time limit

    async def update(
        self, batch: DataProtoRef, mini_batches: Sequence[np.ndarray], objective: TrainingSettings, step: int
    ) -> tuple[DataProtoRef, dict[str, Metric]]:
        """Take one optimizer step per mini-batch (an array of row indices), each split over the groups of ranks.

        Returns:
            (the batch, if on-policy with the `old_log_probs` that the update computed; the metrics, merged over groups
            and averaged over mini-batches).
        """
        groups = len(self.workers) // self._group_size
        shares = [_shares(batch, rows, groups) for rows in mini_batches]
        arguments = []
        for group in range(groups):
            own = np.unique(np.concatenate([share[group] for share in shares]))
            positions = [np.searchsorted(own, share[group]) for share in shares]
            arguments.append((batch.reorder(own), positions, objective, step))
        async with self._free:
            stage, by_rank = self.update_stage, enumerate(self._to_ranks(arguments))
            calls = [self.workers.submit_for_data(rank, stage, "update", *a) for rank, a in by_rank]
            results = self._of_groups(await self.workers.answers(calls))
        merged = [merge_metrics(parts) for parts in zip(*(metrics for metrics, _ in results), strict=True)]
        labels = [label for _, label in results if label is not None]
        if labels:  # on-policy
            old = DataProtoRef.concat([c.handle(la) for c, la in zip(self._of_groups(calls), labels, strict=True)])
            batch = batch.union(old.reorder(np.argsort(np.concatenate(shares[0]))))
        return batch, averaged(merged)


class ActorGroup(TrainedGroup):
    """The policy."""

    update_stage = "update"

    async def take_reference_head(self, ref: ReferenceGroup) -> None:
        """Copy the reference's current output layer to the actor, for the exact KL (`kl_loss_type=full`)."""
        head = (await ref.workers.ask_all("sync_reference", "export_output_layer"))[0]
        await self.workers.ask_all("sync_reference", "load_reference_head", head)


def take_turns(gangs: Sequence[Gang]) -> None:
    """Have gangs whose ranks are on the same GPUs compute one after another: a pass waits for the update of another.

    A GPU that two processes ask at once gives each a slice of time, not the same one on every GPU, so that the ranks of
    one gang would wait in a collective for those that are not in their slice.
    """
    lock = asyncio.Lock()
    for gang in gangs:
        gang._free = lock


async def find_model(groups: Sequence[WorkerGroup], path: str, key: str) -> None:
    """Find or download the model once per node, so that the other processes of the node find it on disk.

    Raises:
        GrpoDistError: a node does not have the model and cannot download it; the message names the node.
    """
    first: dict[str, tuple[WorkerGroup, int]] = {}
    for group in groups:
        for rank, address in zip(group.present, await group.call_home(), strict=True):
            first.setdefault(address.node_id, (group, rank))
    await asyncio.gather(*(group.ask(rank, "start", "find_model", path, key) for group, rank in first.values()))


def _shares(batch: DataProtoRef, rows: np.ndarray, num_groups: int) -> list[np.ndarray]:
    columns = (batch[name][rows] for name in ("uid", "prompt_length", "response_length"))
    return [rows[part] for part in balance(Lengths(*columns), num_groups)]


def averaged(mini_batches: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The metrics of optimizer steps, each merged over ranks: a sum over ranks becomes a mean over steps."""
    means = ({name: Mean(m.value, 1) if isinstance(m, Sum) else m for name, m in row.items()} for row in mini_batches)
    return merge_metrics([*means])
