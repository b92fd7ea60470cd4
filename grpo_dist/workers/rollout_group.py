"""The rollout workers as the driver sees them: who has room, who failed, who is being replaced.

A group of responses goes to the worker with the fewest sequences in flight. How many a worker gets follows from what
its engine says: enough that it never runs dry, and few enough that a slow engine leaves prompts to the others.

A worker that dies, fails, gives a group up unasked or does not answer is ended and started again, gets the weights in
force, and takes part again (weight_sync.py). What it was asked for comes back to the caller (`lost`), who asks another
worker. That has a budget: a run in which workers keep failing stops, with the last failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.errors import EngineError, GrpoDistError, WorkerError
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.group import Call, WorkerGroup, finished
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import Task
from grpo_dist.workers.weight_transport import Outcomes, outcomes

if TYPE_CHECKING:
    from grpo_dist.engines.base import Footprint

# Where an engine's settings do not say how many sequences it runs at once.
MAX_NUM_SEQS = 256
# An engine has this share of what it can run waiting, so that it does not run dry while the driver is busy.
QUEUED_SHARE = 1 / 8


@dataclass
class Member:
    """One rollout worker.

    Attributes:
        max_num_seqs: most sequences its engine runs at once.
        limit: sequences it may have in flight.
        sequences: sequences it has in flight.
        starting: the call of its start, after it was replaced.
        lacks_weights: whether it was replaced and has not got the weights in force yet.
    """

    max_num_seqs: int
    limit: int
    sequences: int = 0
    starting: Call | None = None
    lacks_weights: bool = False

    @property
    def load(self) -> float:
        """Share of its limit that is in flight; infinite while it takes no part."""
        return math.inf if self.starting is not None or self.lacks_weights else self.sequences / self.limit

    def adapt(self, running: int, waiting: int, group_size: int) -> None:
        """Follow the engine's load: fewer in flight where too many wait (its memory is full), more where none do."""
        spare = max(group_size, int(self.max_num_seqs * QUEUED_SHARE))
        if waiting > spare:
            self.limit = max(running + spare, 1)
        elif waiting == 0:
            self.limit = min(self.limit + group_size, self.max_num_seqs + spare)


@dataclass
class _Order:
    """What a call of `generate` was for."""

    uid: str
    num_sequences: int
    aborted: bool = False


class RolloutGroup:
    """The vLLM engines.

    Args:
        workers: their processes.
        restarts: how many may be replaced.
    """

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        self.workers, self.restarts = workers, restarts or RestartBudget()
        self._members = [_member(None) for _ in range(len(workers))]
        self._loads = np.zeros(len(workers))  # by rank, `Member.load`: there may be hundreds, and many groups
        self._settings: list[EngineSettings | None] = [None] * len(workers)
        self._homes: dict[bytes, int] = {}  # prompt -> the worker whose prefix cache has it
        self._orders: dict[Call, _Order] = {}
        self._lost: list[Call] = []
        self._bring: Callable[[Sequence[int]], Outcomes] | None = None
        self._version = -1

    def submit_start(self, settings: Sequence[EngineSettings | None]) -> list[Call]:
        """Start all engines, each with settings of its own, without waiting."""
        self.workers.call_home()
        self._settings = list(settings)
        self._members = [_member(each) for each in settings]
        return [self.workers.submit(rank, "start", "start", each) for rank, each in enumerate(settings)]

    def note_started(self, footprints: Sequence[Footprint | None]) -> None:
        """Note what the engines took, in rank order: one that is started in the place of another takes as much.

        vLLM must not measure again what is free, for by then other roles are at work.
        """
        for rank, (settings, taken) in enumerate(zip(self._settings, footprints, strict=True)):
            if settings is not None and taken is not None:
                kv_cache, total = taken.kv_cache_gib, taken.total_gib
                self._settings[rank] = replace(settings, kv_cache_memory_gib=kv_cache, footprint_gib=total)

    # --- generating --------------------------------------------------------------------------------------------
    @property
    def has_room(self) -> bool:
        """Whether any worker takes another group."""
        return bool(self._loads.min() < 1)

    @property
    def in_flight(self) -> list[Call]:
        """All calls being waited for: groups, and workers that start anew."""
        return [*self._orders, *(m.starting for m in self._members if m.starting is not None)]

    def submit(self, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: Task | None = None) -> Call:
        """Sample a group of responses, without waiting: on the worker that is the least loaded, or, if it has room, on
        the one that has computed the prompt since its weights came.
        """
        home = self._homes.get(key := prompt.tobytes())
        rank = home if home is not None and self._loads[home] < 1 else int(self._loads.argmin())
        self._homes[key] = rank
        self._members[rank].sequences += sampling.n
        self._update_load(rank)
        call = self.workers.submit_for_data(rank, "generate", "generate", uid, prompt, sampling, task)
        self._orders[call] = _Order(uid, sampling.n)
        return call

    def abort(self, calls: Sequence[Call]) -> None:
        """End the generation of these groups; their calls then give None."""
        for rank in range(len(self.workers)):
            orders = [self._orders[call] for call in calls if call in self._orders and call.rank == rank]
            for order in orders:
                order.aborted = True
            if orders:
                self.workers.tell(rank, "abort", [order.uid for order in orders])

    def collect(self, call: Call) -> DataProtoRef | None:
        """Take in a finished call.

        Returns:
            The group's handle; None if there is none: it was aborted, its worker failed (see `take_lost`), or the
            call was a worker's start, or one that nobody waits for any more, of whatever role.

        Raises:
            GrpoDistError: a mistake that another worker would make too, or too many workers have failed.
        """
        if call.group is not self.workers:
            return None
        member = self._members[call.rank]
        starting = member.starting is call
        if not starting and call not in self._orders:  # it went with its worker
            return None
        try:
            answer = call.result()
        except (EngineError, WorkerError) as error:
            self._replace(call.rank, error)
            return None
        if starting:
            member.starting = None
            self._update_load(call.rank)
            return None
        label, load = answer
        order = self._orders[call]
        if label is None and not order.aborted:  # asked again, it may do so for ever
            self._replace(call.rank, self._given_up(call.rank, order.uid))
            return None
        del self._orders[call]
        member.sequences -= order.num_sequences
        member.adapt(load.running, load.waiting, order.num_sequences)
        self._update_load(call.rank)
        return None if label is None else call.handle(label)

    def take_lost(self) -> list[Call]:
        """The calls that went with their workers since this was last asked."""
        lost, self._lost = self._lost, []
        return lost

    def check_deadlines(self) -> None:
        """Replace workers that have not answered for too long.

        Raises:
            GrpoDistError: too many workers have failed.
        """
        for call in self.in_flight:
            starting = self._members[call.rank].starting is call
            if not starting and call not in self._orders:
                continue  # it went with its worker a moment ago
            if call.is_late():
                self._replace(call.rank, self.workers.late([call]))

    # --- weights -----------------------------------------------------------------------------------------------
    def take_weights(self, bring: Callable[[Sequence[int]], Outcomes], version: int) -> None:
        """Give all workers new weights and wait until each has confirmed them.

        A worker that fails is replaced and gets them later (`catch_up`); it does not hold up the others.

        Args:
            bring: brings the weights to workers, and says what came of it for each.
            version: what they hold then.

        Raises:
            WeightSyncError: the weights are damaged, incomplete or out of order.
            GrpoDistError: an engine confirmed another version, or too many workers have failed.
        """
        self._bring, self._version = bring, version
        self._homes.clear()  # new weights empty the prefix caches
        self._bring_to([rank for rank, member in enumerate(self._members) if member.starting is None])

    def free_memory(self) -> None:
        """Have the engines give their GPUs' memory back until they take weights, if they are to (`free_cache_engine`).

        One that is being replaced starts first: beside the update there is no room for it.

        Raises:
            GrpoDistError: too many workers have failed.
        """
        awake = [rank for rank, each in enumerate(self._settings) if each is not None and each.free_cache_engine]
        while awake:
            self._wait_for_starts()
            before = list(self.workers.handles)
            answers = outcomes({rank: self.workers.submit(rank, "update_actor", "sleep") for rank in awake})
            for rank, answer in answers.items():
                if isinstance(answer, GrpoDistError) and before[rank] is self.workers.handles[rank]:
                    self._replace(rank, answer)
            awake = [rank for rank in awake if before[rank] is not self.workers.handles[rank]]

    def _wait_for_starts(self) -> None:
        while starting := [member.starting for member in self._members if member.starting is not None]:
            for call in finished(starting, self.workers.background):
                self.collect(call)
            self.check_deadlines()

    def catch_up(self) -> None:
        """Give workers that were replaced the weights in force. The actor must still hold them.

        Raises:
            GrpoDistError: as `take_weights`.
        """
        late = [rank for rank, member in enumerate(self._members) if member.starting is None and member.lacks_weights]
        self._bring_to(late)

    def _bring_to(self, ranks: Sequence[int]) -> None:
        if not ranks or self._bring is None:
            return
        before = list(self.workers.handles)
        for rank, held in self._bring(ranks).items():
            if before[rank] is not self.workers.handles[rank]:
                continue  # a group that failed meanwhile has told, and the worker was replaced
            if isinstance(held, EngineError | WorkerError):
                self._replace(rank, held)
            elif isinstance(held, GrpoDistError):
                raise held
            elif held != self._version:
                raise GrpoDistError(
                    f"rollout worker {rank} holds weight version {held} after the sync of {self._version}"
                )
            else:
                self._members[rank].lacks_weights = False
                self._update_load(rank)

    # --- replacing ---------------------------------------------------------------------------------------------
    def _replace(self, rank: int, error: GrpoDistError) -> None:
        """End a worker and start it again; what it was asked for is lost."""
        self.restarts.spend(error)
        lost = [call for call in self._orders if call.rank == rank]
        for call in lost:
            del self._orders[call]
        self._lost += lost
        self.workers.respawn(rank)
        member = self._members[rank] = _member(self._settings[rank])
        member.starting = self.workers.submit(rank, "start", "start", self._settings[rank])
        member.lacks_weights = self._bring is not None
        self._update_load(rank)

    def _given_up(self, rank: int, uid: str) -> WorkerError:
        return self.workers.error(
            rank,
            "generate",
            f"the engine gave up the group {uid} by itself: vLLM ended the request as aborted, or with fewer responses "
            "than asked for. Look at actor_rollout_ref.rollout.engine_kwargs and, with VLLM_LOGGING_LEVEL=INFO in the "
            "environment, at what vLLM says",
        )

    def _update_load(self, rank: int) -> None:
        self._loads[rank] = self._members[rank].load


def _member(settings: EngineSettings | None) -> Member:
    most = MAX_NUM_SEQS if settings is None else settings.max_num_seqs
    return Member(most, most + int(most * QUEUED_SHARE))
