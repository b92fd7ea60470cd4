"""Weight sync: brings the actor's weights, under a version number, to all rollout engines.

The driver starts it after each update, and once before the first rollout (`RolloutGroup.sync_weights`). The weights are
sent in buckets of bounded size, each with its number and a checksum: all actor ranks gather one tensor at a time, and
rank 0 packs them, cast to the engine's dtype. How the buckets travel:

- object_store: rank 0 puts them into Ray's object store. An engine reads and checks all of them, writes them into a
  shared memory file for its workers, and only then pauses and loads them. If they are damaged, incomplete or not newer,
  it refuses them and keeps its weights. Works everywhere.
- broadcast: rank 0 broadcasts them to the workers of all engines at once (engines/weights/broadcast.py), with NCCL on
  GPU and gloo on CPU. Needs a separate GPU for every process. Once all engines have paused, each checks and loads the
  buckets as they arrive. A damaged first bucket is refused as above. After a damaged later one the engine holds a mix
  of old and new weights, and samples nothing until a complete sync has succeeded; the transport makes a second attempt
  with the engines that still answer.
- ipc: as broadcast, but each actor rank passes the buckets through shared memory to the engine workers on its own GPU
  or, on CPU, on its own machine (engines/weights/broadcast.py). For the driver it is a broadcast with several senders.

Responses in flight continue with the new weights, or are finished first. The prefix cache
is cleared. Every engine answers with the version it now holds, and tags each token that it samples with it.

A rollout worker that fails during the sync is replaced and does not delay the others (rollout.py). It gets
requests again once it holds the current weights: from the next sync or, while the actor still holds them, from a sync
of its own. Responses of an engine with an unconfirmed version are never used. If an actor rank fails, the sync raises
and the run stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_dist.engines.settings import SENDER, GroupAddress
from grpo_dist.errors import GrpoDistError, WeightSyncError
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.group import WorkerGroup

STAGE = "sync_weights"

# By engine rank: the weight version that it holds after a sync, or the error that it answered with.
Outcomes = dict[int, Any]


class ObjectStoreTransport:
    """Sends the buckets through Ray's object store.

    With `changes_only` it sends what has changed since the last sync. An engine that lacks the last one refuses that,
    and is sent the whole.
    """

    def __init__(self, *, changes_only: bool = False) -> None:
        self.changes_only = changes_only
        self.metrics: dict[str, float] = {}

    async def sync(
        self, actor: WorkerGroup, rollout: WorkerGroup, ranks: Sequence[int], *, version: int, dtype: str
    ) -> Outcomes:
        """Send the weights, cast to `dtype`, to the engines in `ranks`, as version `version`.

        Returns by rank the version that the engine now holds, or the `GrpoDistError` that it answered with.

        Raises:
            GrpoDistError: the actor failed.
        """
        if not self.changes_only:
            return await self._send(actor, rollout, ranks, version, "export_weights", dtype)
        loaded = await self._send(actor, rollout, ranks, version, "export_changes", dtype, False)
        again = [rank for rank, outcome in loaded.items() if isinstance(outcome, WeightSyncError)]
        if again:
            loaded |= await self._send(actor, rollout, again, version, "export_changes", dtype, True)
        return loaded

    async def _send(
        self, actor: WorkerGroup, rollout: WorkerGroup, ranks: Sequence[int], version: int, *export: Any
    ) -> Outcomes:
        before = list(rollout.handles)
        buckets = (await actor.ask_all(STAGE, *export))[0]
        if self.changes_only:
            buckets, self.metrics["perf/sent_weights_share"] = buckets
        same = [rank for rank in ranks if rollout.handles[rank] is before[rank]]  # one may have been replaced meanwhile
        return await outcomes({rank: rollout.submit(rank, STAGE, "load_weights", buckets, version) for rank in same})


class BroadcastTransport:
    """Sends the buckets within a process group of actor rank 0, or with `ipc` all actor ranks, and all engine workers.

    The group is formed by the first sync, and again when the engines have changed or a sync has failed.

    Args:
        timeout_s: seconds that a rank waits for another one. Must be less than the timeout of FSDP's collectives, in
            which the other actor ranks wait meanwhile. Half of the actor's time limit is used instead, if that is less.
        backend: "broadcast" or "ipc".
    """

    def __init__(self, workers_per_engine: int, timeout_s: float, backend: str = "broadcast") -> None:
        self.workers_per_engine, self.timeout_s, self.backend = workers_per_engine, timeout_s, backend
        self.generation = 0
        self.metrics: dict[str, float] = {}
        self._members: list[Any] = []

    async def sync(
        self, actor: WorkerGroup, rollout: WorkerGroup, ranks: Sequence[int], *, version: int, dtype: str
    ) -> Outcomes:
        """See `ObjectStoreTransport.sync`. If an engine dies, the others get a second attempt without it."""
        loaded = await self._attempt(actor, rollout, ranks, version, dtype)
        again = [rank for rank, outcome in loaded.items() if isinstance(outcome, WeightSyncError)]
        return loaded | await self._attempt(actor, rollout, again, version, dtype) if again else loaded

    def rank_timeout_s(self, actor: WorkerGroup) -> float:
        """Seconds that a rank waits for another one; less than the driver waits for the ranks."""
        return min(self.timeout_s, actor.limits.of(STAGE) / 2)

    async def _attempt(
        self, actor: WorkerGroup, rollout: WorkerGroup, ranks: Sequence[int], version: int, dtype: str
    ) -> Outcomes:
        members = [rollout.handles[rank] for rank in ranks]
        if members != self._members:
            failed = await self._form(actor, rollout, ranks, members)
            if failed:
                return failed
        self._members = []  # until this sync has succeeded
        # Responses may have to finish first, which can exceed the rank timeout, so no rank sends before the pause.
        problem = "the weights were not sent: one of the engines is dead"
        _, failed = await _ask_engines(rollout, ranks, members, "pause_for_weights", problem)
        if failed:
            return failed
        sends = actor.submit_all(STAGE, "broadcast_weights", dtype, version)
        loads = {rank: rollout.submit(rank, STAGE, "receive_weights", version) for rank in ranks}
        loaded = await outcomes(loads)
        sent = await outcomes(dict(enumerate(sends)))
        await _raise_first(actor, (outcome for outcome in sent.values() if not isinstance(outcome, WeightSyncError)))
        if all(outcome == version for outcome in loaded.values()):
            await _raise_first(actor, sent.values())
            self._members = members
        return loaded

    async def _form(
        self, actor: WorkerGroup, rollout: WorkerGroup, ranks: Sequence[int], members: Sequence[Any]
    ) -> Outcomes:
        """Form the group of senders and engines; returns {} or, if that fails, the outcome of each engine."""
        problem = "the weight group was not formed: one of its engines is dead"
        addresses, failed = await _ask_engines(rollout, ranks, members, "address", problem)
        if failed:
            return failed
        senders = range(len(actor)) if self.backend == "ipc" else [SENDER]
        ips = [addresses[rank].ip for rank in ranks] + [actor.addresses[rank].ip for rank in senders[1:]]
        host, port = await actor.ask(SENDER, STAGE, "open_weight_store", ips)
        self.generation += 1
        workers = self.workers_per_engine
        address = GroupAddress(
            host=host,
            port=port,
            generation=self.generation,
            world_size=len(senders) + workers * len(ranks),
            timeout_s=self.rank_timeout_s(actor),
            backend=self.backend,
            num_senders=len(senders),
        )
        sending = {rank: actor.submit(rank, STAGE, "join_weight_group", address) for rank in senders}
        joins = {
            rank: rollout.submit(rank, STAGE, "join_weight_group", address, len(senders) + place * workers)
            for place, rank in enumerate(ranks)
        }
        joined, sent = await outcomes(joins), await outcomes(sending)
        if not any(isinstance(outcome, GrpoDistError) for outcome in joined.values()):
            await _raise_first(actor, sent.values())
            return {}
        unformed = WeightSyncError("the weight group was not formed")
        return {rank: outcome or unformed for rank, outcome in joined.items()}


WeightTransport = ObjectStoreTransport | BroadcastTransport


def weight_transport(
    name: str, *, workers_per_engine: int, collective_timeout_s: float, changes_only: bool = False
) -> WeightTransport:
    """Make a transport: "object_store", "broadcast" or "ipc"; see `ObjectStoreTransport` and `BroadcastTransport`."""
    if name == "object_store":
        return ObjectStoreTransport(changes_only=changes_only)
    return BroadcastTransport(workers_per_engine, collective_timeout_s / 2, name)


async def outcomes(calls: Mapping[int, Call]) -> Outcomes:
    """Wait for all calls (of one worker group); their answers, or the errors that they raised."""
    if not calls:
        return {}
    group = next(iter(calls.values())).group
    return dict(zip(calls, await group.outcomes(list(calls.values())), strict=True))


async def _ask_engines(
    rollout: WorkerGroup, ranks: Sequence[int], members: Sequence[Any], method: str, problem: str
) -> tuple[Outcomes, Outcomes]:
    """Call a method on the engines `ranks`, whose processes were `members`.

    Returns:
        (the answers; {} or, if an engine failed, the outcome of the sync: its error, and `problem` for the others).
    """
    answers = await outcomes({rank: rollout.submit(rank, STAGE, method) for rank in ranks})
    for rank, handle in zip(ranks, members, strict=True):
        if rollout.handles[rank] is not handle:  # do not wait for its new process, which is still starting
            answers[rank] = rollout.error(rank, STAGE, "its process was replaced")
    errors = {rank: outcome for rank, outcome in answers.items() if isinstance(outcome, GrpoDistError)}
    return answers, {rank: errors.get(rank) or WeightSyncError(problem) for rank in ranks} if errors else {}


async def _raise_first(group: WorkerGroup, awaited: Iterable[Any]) -> None:
    for outcome in awaited:
        if isinstance(outcome, GrpoDistError):
            raise await group.root_cause(outcome)
