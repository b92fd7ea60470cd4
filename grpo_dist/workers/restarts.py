"""The restart budget: how many workers may be replaced before the run stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_dist.errors import GrpoDistError
from grpo_dist.workers.nodes import Nodes


@dataclass
class RestartBudget:
    """The number of faults that the rollout, reward and reference workers of a run share.

    Attributes:
        most: faults after which workers may be replaced (`trainer.max_worker_restarts`). A lost machine is one, however
            many workers it had, and none if the run can do without all of these.
        nodes: says which machines are lost, and where there is room.
        failures: the error behind each replacement so far.
        machines_lost: how many machines were lost with them.
    """

    most: int = 0
    nodes: Nodes = field(default_factory=Nodes)
    failures: list[str] = field(default_factory=list)
    machines_lost: int = 0
    _lost: list[tuple[str, bool]] = field(default_factory=list)  # node, and whether the worker was required

    async def judge(self, error: GrpoDistError, node_id: str, *, required: bool = True) -> None:
        """Wait until it is known whether a worker was lost with its machine, and count one replacement.

        Args:
            error: how it was lost.
            node_id: Ray's id of its node, "" if that is not known.
            required: whether the run had to have the worker.

        Raises:
            GrpoDistError: `error`, if no replacement is left.
        """
        self.spend(error, node_id, await self.nodes.dead(), required=required)

    def spend(self, error: GrpoDistError, node_id: str, dead: Mapping[str, str], *, required: bool = True) -> None:
        """Count one replacement; `dead` has the lost machines by node id. Raises as `judge`."""
        if node_id in dead:
            error.add_note(f"its machine is lost: {dead[node_id]}")
        lost = [*self._lost, (node_id, required)]
        self.machines_lost = len({node for node, _ in lost} & dead.keys())
        alone = sum(node not in dead for node, _ in lost)
        if alone + len({node for node, had_to in lost if had_to and node in dead}) > self.most:
            if self.most:
                error.add_note(f"trainer.max_worker_restarts={self.most} faults have already been made good")
            raise error
        self.failures.append(f"{error}; its machine is lost: {dead[node_id]}" if node_id in dead else str(error))
        self._lost = lost
