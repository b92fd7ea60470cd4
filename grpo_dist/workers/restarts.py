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
            many workers it had.
        nodes: says which machines are lost, and where there is room.
        failures: the error behind each replacement so far.
        machines_lost: how many machines were lost with workers.
    """

    most: int = 0
    nodes: Nodes = field(default_factory=Nodes)
    failures: list[str] = field(default_factory=list)
    machines_lost: int = 0
    _node_ids: list[str] = field(default_factory=list)  # of the workers that were replaced
    _places: set[str] = field(default_factory=set)  # of all that were lost

    async def judge(self, error: GrpoDistError, node_id: str) -> None:
        """Wait until it is known whether a worker was lost with its machine, and count one replacement.

        Args:
            error: how it was lost.
            node_id: Ray's id of its node, "" if that is not known.

        Raises:
            GrpoDistError: `error`, if no replacement is left.
        """
        self.spend(error, node_id, await self.nodes.dead())

    def spend(self, error: GrpoDistError, node_id: str, dead: Mapping[str, str]) -> None:
        """Count one replacement; `dead` has the lost machines by node id. Raises as `judge`."""
        if node_id in dead:
            error.add_note(f"its machine is lost: {dead[node_id]}")
        node_ids = [*self._node_ids, node_id]
        self.note_machine(node_id, dead)
        if sum(each not in dead for each in node_ids) + len(dead.keys() & set(node_ids)) > self.most:
            if self.most:
                error.add_note(f"trainer.max_worker_restarts={self.most} faults have already been made good")
            raise error
        self.failures.append(f"{error}; its machine is lost: {dead[node_id]}" if node_id in dead else str(error))
        self._node_ids = node_ids

    def note_machine(self, node_id: str, dead: Mapping[str, str]) -> None:
        """Note where a worker was lost, without counting a fault: what it has answered is lost with its machine."""
        self._places.add(node_id)
        self.machines_lost = len(dead.keys() & self._places)
