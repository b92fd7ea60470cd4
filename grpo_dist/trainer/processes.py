"""The processes of a run's roles: reserved and started together, asked for their peak memory, and ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_dist.config.node_layout import Slot
from grpo_dist.errors import ConfigError
from grpo_dist.trainer.metrics import ask_for_peak, take_peaks
from grpo_dist.workers.environment import shared_environment
from grpo_dist.workers.event_loop import blocking, run
from grpo_dist.workers.group import DATA_STAYS_IN_STORE, WorkerGroup
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.nodes import Nodes
from grpo_dist.workers.policy import PolicyWorker
from grpo_dist.workers.process import Process
from grpo_dist.workers.resources import nodes_of, release, reserve
from grpo_dist.workers.shared_folder import check_shared

# Seconds that a finished run waits for its workers to report their peak memory.
MEMORY_TIMEOUT_S = 30.0


class RoleProcesses:
    """The processes of all roles, from reservation to shutdown.

    Attributes:
        groups: the processes by role.

    Args:
        slots: the processes with their resources and machines; those of a role in rank order.
        workers: the worker class of each role.
        limits: seconds that a call may take.
        run_dir: the run directory, absolute.
        env: by role, what the environment of a process must have when it starts.
        concurrency: by role, how many calls a process takes at a time; 1 for the others.
        nodes: of the cluster.
        again: whether the run has had all processes before: then a machine may be lost, for which another one may come.

    Raises:
        ConfigError: the cluster does not have the resources, or its nodes do not share the run directory.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        workers: Mapping[str, type[Process]],
        limits: TimeLimits,
        run_dir: Path,
        *,
        env: Mapping[str, Mapping[str, str]] | None = None,
        concurrency: Mapping[str, int] | None = None,
        nodes: Nodes,
        again: bool = False,
    ) -> None:
        self.nodes = nodes
        self._placement_groups, bundles = run(nodes.reserve_again(slots)) if again else reserve(slots)
        try:
            check_shared(run_dir, nodes_of({each.group for part in bundles.values() for each in part if each.required}))
        except ConfigError:
            release(self._placement_groups)
            raise
        shared = shared_environment(os.environ)
        self.groups: dict[str, WorkerGroup] = {}
        for role, worker in workers.items():
            if role in bundles:
                size = len(bundles[role])
                self.groups[role] = WorkerGroup.spawn(
                    role,
                    worker,
                    bundles[role],
                    args=[(rank, size) if issubclass(worker, PolicyWorker) else () for rank in range(size)],
                    limits=limits,
                    env=DATA_STAYS_IN_STORE | dict((env or {}).get(role, {})),
                    shared=shared,
                    max_concurrency=(concurrency or {}).get(role, 1),
                )

    @blocking
    async def peak_memory(self) -> dict[str, float]:
        """Peak memory in GiB of the largest process of each role, resident and on GPU."""
        peaks: dict[str, float] = {}
        for group in self.groups.values():
            calls = [ask_for_peak(group, rank) for rank in group.present]
            for parts in await group.answers(calls, MEMORY_TIMEOUT_S):
                take_peaks(peaks, group.role, parts)
        return peaks

    def shutdown(self) -> None:
        """End every process."""
        self.nodes.close()
        for group in self.groups.values():
            group.kill()
        release(self._placement_groups)
