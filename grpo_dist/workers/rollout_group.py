"""The rollout workers as the driver sees them: a pool whose workers also need weights.

A group of responses goes to the worker with the fewest sequences in flight. How many a worker gets follows from what
its engine says: enough that it never runs dry, and few enough that a slow engine leaves prompts to the others.

A worker that dies, fails, gives a group up unasked or does not answer is replaced (pool.py). Its new process takes part
once it holds the weights in force (weight_sync.py).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.errors import EngineError, GrpoDistError, WorkerError
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.pool import Member, Pool
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import Task
from grpo_dist.workers.weight_transport import Outcomes, outcomes

if TYPE_CHECKING:
    from grpo_dist.engines.base import Footprint

# Where an engine's settings do not say how many sequences it runs at once.
MAX_NUM_SEQS = 256
# An engine has this share of what it can run waiting, so that it does not run dry while the driver is busy.
QUEUED_SHARE = 1 / 8


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to sample for: its group id, token ids, sampling, what the reward function is told, and whether
    log-probs of its responses are wanted.
    """

    uid: str
    token_ids: np.ndarray
    sampling: SamplingSettings
    task: Task
    needs_log_probs: bool = True


@dataclass
class Engine(Member):
    """One rollout worker; its limit is in sequences.

    Attributes:
        max_num_seqs: most sequences its engine runs at once.
        lacks_weights: whether it was replaced and has not got the weights in force yet.
    """

    max_num_seqs: int = MAX_NUM_SEQS
    lacks_weights: bool = False

    def adapt(self, running: int, waiting: int, group_size: int) -> None:
        """Follow the engine's load: fewer in flight where too many wait (its memory is full), more where none do."""
        spare = max(group_size, int(self.max_num_seqs * QUEUED_SHARE))
        if waiting > spare:
            self.limit = max(running + spare, 1)
        elif waiting == 0:
            self.limit = min(self.limit + group_size, self.max_num_seqs + spare)


class RolloutGroup(Pool):
    """The vLLM engines.

    Args:
        workers: their processes.
        restarts: how many may be replaced.
    """

    members: list[Engine]  # type: ignore[assignment]
    _bring: Callable[[Sequence[int]], Awaitable[Outcomes]] | None = None
    _version = -1

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        super().__init__(workers, restarts or RestartBudget(), replaces=(EngineError, WorkerError))
        self._in_force = asyncio.Event()  # the actor holds the weights that the engines shall have
        self._syncing = asyncio.Lock()
        self._aborted: set[Call] = set()

    def new_member(self, rank: int) -> Engine:
        """See `Pool`."""
        settings: EngineSettings | None = self.settings[rank]
        most = MAX_NUM_SEQS if settings is None else settings.max_num_seqs
        limit = most + int(most * QUEUED_SHARE)
        return Engine(limit, max_num_seqs=most, lacks_weights=self._bring is not None)

    def note_started(self, footprints: Sequence[Footprint | None]) -> None:
        """Note what the engines took, in rank order: one that is started in the place of another takes as much.

        vLLM must not measure again what is free, for by then other roles are at work.
        """
        for rank, (settings, taken) in enumerate(zip(self.settings, footprints, strict=True)):
            if settings is not None and taken is not None:
                kv_cache, total = taken.kv_cache_gib, taken.total_gib
                self.settings[rank] = replace(settings, kv_cache_memory_gib=kv_cache, footprint_gib=total)

    # --- generating --------------------------------------------------------------------------------------------
    async def generate(
        self, request: GroupRequest, *, first: bool = False, on_sent: Callable[[], None] = lambda: None
    ) -> DataProtoRef:
        """Sample a group of responses: on the worker that is the least loaded, or, if it has room, on the one that has
        computed the prompt since its weights came. If the caller is cancelled, the engine is told to abort the group.

        Args:
            request: what to sample.
            first: before all that waits.
            on_sent: called whenever a worker is asked.

        Raises:
            GrpoDistError: a mistake that another worker would make too, or too many workers have failed.
        """
        uid, prompt, sampling = request.uid, request.token_ids, request.sampling

        def send(rank: int) -> Call:
            on_sent()
            return self.workers.submit_for_data(rank, "generate", "generate", uid, prompt, sampling, request.task)

        def take_in(call: Call, answer: Any) -> DataProtoRef | None:
            label, load = answer
            if call.is_current:
                self.members[call.rank].adapt(load.running, load.waiting, sampling.n)
            if label is not None:
                return call.handle(label)
            if call not in self._aborted:  # asked again, it may do so for ever
                raise self._given_up(call.rank, uid)
            self._aborted.discard(call)
            return None

        abort = functools.partial(self._abort, uid)
        return await self.ask(send, take_in, size=sampling.n, key=prompt.tobytes(), first=first, give_up=abort)

    def _abort(self, uid: str, call: Call) -> None:
        self._aborted.add(call)
        if call.is_current:
            self.workers.tell(call.rank, "abort", [uid])

    def _given_up(self, rank: int, uid: str) -> WorkerError:
        return self.workers.error(
            rank,
            "generate",
            f"the engine gave up the group {uid} by itself: vLLM ended the request as aborted, or with fewer responses "
            "than asked for. Look at actor_rollout_ref.rollout.engine_kwargs and, with VLLM_LOGGING_LEVEL=INFO in the "
            "environment, at what vLLM says",
        )

    # --- weights -----------------------------------------------------------------------------------------------
    async def take_weights(self, bring: Callable[[Sequence[int]], Awaitable[Outcomes]], version: int) -> None:
        """Give all workers new weights and wait until each has confirmed them.

        A worker that fails is replaced and gets them later (`prepare`); it does not hold up the others.

        Args:
            bring: brings the weights to workers, and says for each the version it holds or the error it gave.
            version: what they hold then.

        Raises:
            WeightSyncError: the weights are damaged, incomplete or out of order.
            GrpoDistError: an engine confirmed another version, or too many workers have failed.
        """
        async with self._syncing:
            self._bring, self._version = bring, version
            self._homes.clear()  # new weights empty the prefix caches
            await self._bring_to([rank for rank in range(len(self.workers)) if not self.is_starting(rank)])
            self._in_force.set()

    async def begin_update(self) -> None:
        """The actor's weights are about to change: workers that lack weights now wait for the next sync. Engines that
        are to (`free_cache_engine`) give their GPUs' memory back until then.

        One that is being replaced starts first: beside the update there is no room for it.

        Raises:
            GrpoDistError: too many workers have failed.
        """
        async with self._syncing:
            self._in_force.clear()
        awake = [rank for rank, each in enumerate(self.settings) if each is not None and each.free_cache_engine]
        while awake:
            await self.started()
            before = list(self.workers.handles)
            calls = {rank: self.workers.submit(rank, "update_actor", "sleep") for rank in awake}
            for rank, answer in (await outcomes(calls)).items():
                if isinstance(answer, GrpoDistError):
                    self.replace(rank, before[rank], answer)
            awake = [rank for rank in awake if before[rank] is not self.workers.handles[rank]]

    async def prepare(self, rank: int) -> None:
        """Bring the weights in force to a worker that was replaced, while the actor holds them. See `Pool`."""
        member = self.members[rank]
        while member.lacks_weights and member is self.members[rank]:
            await self._in_force.wait()
            async with self._syncing:
                if self._in_force.is_set():
                    late = [i for i, each in enumerate(self.members) if each.lacks_weights and not self.is_starting(i)]
                    await self._bring_to(late)

    async def _bring_to(self, ranks: Sequence[int]) -> None:
        if not ranks or self._bring is None:
            return
        before = list(self.workers.handles)
        for rank, held in (await self._bring(ranks)).items():
            if before[rank] is not self.workers.handles[rank]:
                continue  # a group that failed meanwhile has told, and the worker was replaced
            if isinstance(held, EngineError | WorkerError):
                self.replace(rank, before[rank], held)
            elif isinstance(held, GrpoDistError):
                raise held
            elif held != self._version:
                raise GrpoDistError(
                    f"rollout worker {rank} holds weight version {held} after the sync of {self._version}"
                )
            else:
                self.members[rank].lacks_weights = False
