"""The rollout workers as the driver sees them: a pool whose workers also need the current weights.

A group of responses goes to the worker with the lowest load. How many groups a worker may have in flight is adapted to
the load that its engine reports: enough that it never idles, and few enough that a slow engine does not hold back
prompts that others could sample.

A worker that dies, fails, aborts a group by itself or does not answer is replaced (pool.py). Its new process gets
requests once it holds the current weights (weight_transport.py). One whose machine is lost is left out until another
one has room for it. One that is not required (`cluster.max_rollout_world_size`) gets its first weights apart from the
others, so that a machine that cannot be reached holds nobody up but itself.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.errors import AgentError, EngineError, GrpoDistError, WeightSyncError, WorkerError
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.pool import Member, Pool, Waiting
from grpo_dist.workers.scorer import Task
from grpo_dist.workers.weight_transport import Outcomes, WeightTransport, outcomes

if TYPE_CHECKING:
    from grpo_dist.engines.base import EngineLoad, Footprint

# Default for engines whose settings do not say how many sequences they run at once.
MAX_NUM_SEQS = 256
# An engine has this share of its capacity waiting in its queue, so that it does not idle while the driver is busy.
QUEUED_SHARE = 1 / 8


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to sample a group of responses for.

    Attributes:
        token_ids: (P,) token ids of the prompt.
        sampling: sampling settings; `n` is the group size.
        task: the arguments of the reward function besides the response.
        needs_log_probs: whether log-probs of the responses are computed.
    """

    uid: str
    token_ids: np.ndarray
    sampling: SamplingSettings
    task: Task
    needs_log_probs: bool = True


@dataclass
class Engine(Member):
    """One rollout worker; its limit counts sequences.

    Attributes:
        max_num_seqs: most sequences its engine runs at once.
        lacks_weights: whether it came later than the others and does not hold the current weights yet.
    """

    max_num_seqs: int = MAX_NUM_SEQS
    lacks_weights: bool = False

    def adapt(self, running: int, waiting: int, group_size: int) -> None:
        """Adapt the limit to the engine's load: lower if too many sequences wait (cache full), higher if none waits."""
        spare = max(group_size, int(self.max_num_seqs * QUEUED_SHARE))
        if waiting > spare:
            self.limit = max(running + spare, 1)
        elif waiting == 0:
            self.limit = min(self.limit + group_size, self.max_num_seqs + spare)


class RolloutGroup(Pool):
    """The rollout engines.

    Attributes:
        weights_gone: set while no engine has the current weights, and none can get them: the actor is being updated.
    """

    members: list[Engine]  # type: ignore[assignment]
    _bring: Callable[[Sequence[int]], Awaitable[Outcomes]] | None = None
    _version = -1

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        super().__init__(workers, restarts or RestartBudget(), replaces=(EngineError, WorkerError))
        self._in_force = asyncio.Event()  # set while the actor holds the weights that the engines need
        self.weights_gone = asyncio.Event()
        self._syncing = asyncio.Lock()
        self._aborted: set[Call] = set()

    def new_member(self, rank: int) -> Engine:
        """See `Pool.new_member`."""
        settings: EngineSettings | None = self.settings[rank]
        most = MAX_NUM_SEQS if settings is None else settings.rollout.max_num_seqs
        limit = most + int(most * QUEUED_SHARE)
        late = self._bring is not None or not self.workers.is_required(rank)
        return Engine(limit, max_num_seqs=most, lacks_weights=late)

    def note_started(self, footprints: Sequence[Footprint | None]) -> None:
        """Store the memory that the engines use, in rank order, as a setting for their replacements.

        A replacement must not measure free memory as vLLM does, because other roles are running by then.
        """
        for rank, (settings, taken) in enumerate(zip(self.settings, footprints, strict=True)):
            if settings is not None and taken is not None:
                rollout = settings.rollout.replaced(kv_cache_memory_gib=taken.kv_cache_gib)
                self.settings[rank] = replace(settings, rollout=rollout, footprint_gib=taken.total_gib)

    # --- generating --------------------------------------------------------------------------------------------
    async def generate(
        self,
        request: GroupRequest,
        *,
        first: bool = False,
        on_sent: Callable[[], None] = lambda: None,
        on_failed: Callable[[list[AgentError]], None] = lambda failed: None,
    ) -> DataProtoRef:
        """Sample a group of responses.

        The worker with the lowest load gets the request, or the one that has the prompt in its prefix cache, if it has
        capacity. If the caller is cancelled, the engine aborts the group.

        Args:
            first: put the request at the head of the queue.
            on_sent: called each time the request is sent to a worker.
            on_failed: called with the attempts at its episodes that have failed, whether the group has a result or not.

        Raises:
            AgentError: too few of its episodes are left.
            GrpoDistError: an error that would occur on every worker, or the restart budget is used up.
        """
        uid, prompt, sampling = request.uid, request.token_ids, request.sampling

        def send(rank: int) -> Call:
            on_sent()
            return self.workers.post(rank, "generate", "generate", uid, prompt, sampling, request.task)

        def take_in(call: Call, answer: Any) -> DataProtoRef | None:
            label, load, failed = answer
            if call.is_current:
                self._take_load(self.members[call.rank], load, sampling.n)
            if failed:
                on_failed(failed)
            if label is not None:
                return call.handle(label)
            if failed:
                raise failed[-1]
            if call not in self._aborted:  # not repeated on this engine, which might abort it again for ever
                raise self._aborted_by_engine(call.rank, uid)
            return None

        abort = functools.partial(self._abort, uid)
        return await self.ask(send, take_in, size=sampling.n, key=prompt.tobytes(), first=first, give_up=abort)

    def _take_load(self, engine: Engine, load: EngineLoad, group_size: int) -> None:
        engine.adapt(load.running, load.waiting, group_size)

    async def _answered(self, call: Call, member: Member, waiting: Waiting) -> Any:
        try:
            return await super()._answered(call, member, waiting)
        finally:
            self._aborted.discard(call)  # however it has ended: a call that is kept pins its responses

    def _abort(self, uid: str, call: Call) -> None:
        self._aborted.add(call)
        if call.is_current:
            self.workers.tell(call.rank, "abort", [uid])

    def _aborted_by_engine(self, rank: int, uid: str) -> WorkerError:
        return self.workers.error(
            rank,
            "generate",
            f"the engine aborted the group {uid} by itself: vLLM ended the request as aborted, or with fewer responses "
            "than requested. Check actor_rollout_ref.rollout.engine_kwargs, and read vLLM's log with "
            "VLLM_LOGGING_LEVEL=INFO in the environment",
        )

    # --- weights -----------------------------------------------------------------------------------------------
    async def sync_weights(self, actor: WorkerGroup, transport: WeightTransport, *, version: int, dtype: str) -> None:
        """Send the actor's weights to all workers, in `dtype`, a torch name such as "float32"; see `take_weights`.

        Raises:
            GrpoDistError: an actor rank failed, the restart budget is used up, or an engine confirmed another version.
        """
        await self.take_weights(
            functools.partial(transport.sync, actor, self.workers, version=version, dtype=dtype), version
        )

    async def take_weights(self, bring: Callable[[Sequence[int]], Awaitable[Outcomes]], version: int) -> None:
        """Send new weights to all workers and wait until each has confirmed them.

        A worker that fails is replaced and gets the weights later (`prepare`); it does not delay the others.

        Args:
            bring: sends the weights to workers, and returns for each the version it now holds, or its error.

        Raises:
            WeightSyncError: the weights are damaged, incomplete or out of order.
            GrpoDistError: an engine confirmed another version.
        """
        async with self._syncing:
            self._bring, self._version = bring, version
            self._homes.clear()  # new weights empty the prefix caches
            ranks = [rank for rank in range(len(self.workers)) if not self._comes_later(rank)]
            for rank in set(range(len(self.workers))).difference(ranks):
                self.members[rank].lacks_weights = True
            await self._bring_to(ranks)
            self._in_force.set()
            self.weights_gone.clear()

    def update_load(self, rank: int) -> None:
        """See `Pool.update_load`."""
        super().update_load(rank)
        self._note_loss()

    def _note_loss(self) -> None:
        if not self._in_force.is_set() and not self._someone.is_set():
            self.weights_gone.set()

    def _comes_later(self, rank: int) -> bool:
        new = self.members[rank].lacks_weights and not self.workers.is_required(rank)
        return new or self.is_starting(rank)

    async def begin_update(self) -> None:
        """Prepare for an update of the actor: workers without weights wait for the next sync, and engines that
        sleep release their GPU memory until then.

        Replaced workers finish starting first, because during the update there is no GPU memory for that.

        Raises:
            GrpoDistError: the restart budget is used up.
        """
        async with self._syncing:
            self._in_force.clear()
            self._note_loss()
        awake = [rank for rank, settings in enumerate(self.settings) if settings is not None and settings.sleeps]
        while awake:
            await self.started()
            before = list(self.workers.handles)
            present = set(awake).intersection(self.workers.present)
            calls = {rank: self.workers.submit(rank, "update_actor", "sleep") for rank in sorted(present)}
            for rank, answer in (await outcomes(calls)).items():
                if isinstance(answer, GrpoDistError):
                    self.replace(rank, before[rank], answer)
            awake = [rank for rank in awake if before[rank] is not self.workers.handles[rank]]

    async def prepare(self, rank: int) -> None:
        """Send the current weights to a worker that was replaced, while the actor holds them. See `Pool.prepare`."""
        member = self.members[rank]
        while member.lacks_weights and member is self.members[rank]:
            await self._in_force.wait()
            async with self._syncing:
                if self._in_force.is_set():
                    late = [i for i, m in enumerate(self.members) if m.lacks_weights and not self._comes_later(i)]
                    await self._bring_to(late if self.workers.is_required(rank) else [rank])

    async def _bring_to(self, ranks: Sequence[int]) -> None:
        if not ranks or self._bring is None:
            return
        before = list(self.workers.handles)
        for rank, held in (await self._bring(ranks)).items():
            if before[rank] is not self.workers.handles[rank]:
                continue  # replaced meanwhile, because one of its groups failed
            on_its_own = isinstance(held, WeightSyncError) and not self.workers.is_required(rank)
            if isinstance(held, EngineError | WorkerError) or (on_its_own and len(ranks) == 1):
                self.replace(rank, before[rank], held)
            elif isinstance(held, GrpoDistError):
                raise held
            elif held != self._version:
                wrong = f"holds weight version {held} after the sync of {self._version}"
                raise GrpoDistError(f"rollout worker {rank} {wrong}")
            else:
                self.members[rank].lacks_weights = False
