"""Machines that fail: whether a worker was lost alone or with its machine, and room for what replaces it.

Ray calls a node dead once its health check has failed for a while (up to a minute), and until then places replacements
on it. So whoever replaces a worker first waits until every node answers or is dead (`Nodes.dead`). By then Ray looks
for another node for the placement groups that were on it, and a worker is started when its group has found one
(`Nodes.has_room`).

The restart budget says how many workers may be replaced before the run stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.runtime.cluster import answers
from grpo_dist.runtime.resources import Bundle, amounts, is_placed, machine_sizes, release, requested, reserve

if TYPE_CHECKING:
    from grpo_dist.plan.placement import Slot


# A live node answers at once.
CONNECT_TIMEOUT_S = 5.0
# Ray's health check, as it is set by default, calls a silent node dead after 65 s.
VERDICT_TIMEOUT_S = 120.0
POLL_S = 0.5
# For what is not required: there may be many of them, for all of the run.
PATIENT_POLL_S = 5.0
# Ray has found a node with room by then, if there is one.
RESCHEDULED_S = 10.0
WAIT_KEY = "trainer.node_wait_minutes"
# In the run's own cluster, to which no other machine comes: what is killed leaves its room in that time.
OWN_WAIT_MINUTES = 1.0


class Nodes:
    """The nodes of the Ray cluster, as the driver finds them. Its coroutines do not block the loop.

    Args:
        wait_minutes: how long a role without a single process waits for a node with room.
        tell: called with a line for the user when such a wait begins.
        own: whether the cluster is the run's own, this machine alone: then it does not wait for another one.

    Attributes:
        give_way: called when a role that is required waits for room: whoever is not required leaves theirs.
    """

    def __init__(
        self, wait_minutes: float = 0.0, tell: Callable[[str], None] = lambda line: None, *, own: bool = False
    ) -> None:
        self.wait_minutes = min(wait_minutes, OWN_WAIT_MINUTES) if own else wait_minutes
        self.tell, self.own, self._closed = tell, own, False
        self.give_way: list[Callable[[], None]] = []

    def close(self) -> None:
        """End all waits for room: the run has ended its workers."""
        self._closed = True

    async def dead(self) -> dict[str, str]:
        """Wait until each node answers or is dead by Ray's verdict; the dead ones by id, as "HOST (ADDRESS)"."""
        deadline = time.monotonic() + VERDICT_TIMEOUT_S
        while True:
            nodes = await self._ask(ray.nodes)
            places = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes if node["Alive"]]
            asked = [asyncio.to_thread(answers, place, CONNECT_TIMEOUT_S) for place in places]
            if all(await asyncio.gather(*asked)) or time.monotonic() > deadline:
                return {node["NodeID"]: node_name(node) for node in nodes if not node["Alive"]}
            await asyncio.sleep(POLL_S)

    async def reserve_again(self, slots: Sequence[Slot]) -> tuple[list[Any], dict[str, list[Bundle]]]:
        """Reserve for a run whose workers all start again, as `reserve` does, once it is known which nodes are dead.

        If there is no room for all, roles whose processes work alone begin with fewer.

        Raises:
            GrpoDistError: there was not even room for these within `wait_minutes`.
        """
        if await self.dead():
            self.tell(f"placing all workers on the machines that are left; {await self._situation()}")
        deadline = time.monotonic() + 60 * self.wait_minutes
        while True:
            try:  # in short attempts, so that a signal need not wait for the thread
                return await asyncio.to_thread(reserve, slots, timeout_s=RESCHEDULED_S, one_is_enough=True)
            except ConfigError:
                if time.monotonic() > deadline:
                    raise await self._no_room(requested(slots)) from None

    async def has_room(self, bundle: Bundle) -> bool:
        """Tell if a bundle is on a node."""
        return bool(await self._ask(is_placed, bundle.group))

    async def wait_for_room(
        self, role: str, bundles: Sequence[Bundle], others: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until all these bundles are on nodes; without an end, and silently, for those that are not required.

        Args:
            others: whether the role has other processes, so that there is time.

        Raises:
            GrpoDistError: there was no room within `wait_minutes`.
        """
        since = begun = time.monotonic()
        required = any(bundle.required for bundle in bundles)
        patience, said = max(60 * self.wait_minutes, RESCHEDULED_S), not required
        while not all([await self.has_room(bundle) for bundle in bundles]):
            if not said and time.monotonic() - begun > RESCHEDULED_S / 2:
                if not self.own:
                    self.tell(f"{_needs(role, bundles)}: waiting for a machine with room; {await self._situation()}")
                said = True
                for give_way in () if others() else self.give_way:
                    give_way()
            if others() or not required:
                since = time.monotonic()
            elif time.monotonic() - since > patience:
                raise await self._no_room(_needs(role, bundles))
            await asyncio.sleep(POLL_S if required else PATIENT_POLL_S)

    async def leave_room(self, bundle: Bundle) -> None:
        """Give the room of a bundle to others, for good."""
        await self._ask(release, [bundle.group])

    async def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Ask Ray, unless the run has left it: then any call would start another cluster."""
        if self._closed or not ray.is_initialized():
            raise asyncio.CancelledError
        return await asyncio.to_thread(question, *arguments)

    async def _situation(self) -> str:
        nodes = await self._ask(ray.nodes)
        lost = ", ".join(sorted({node_name(node) for node in nodes if not node["Alive"]})) or "none"
        alive = machine_sizes(node for node in nodes if node["Alive"])
        return f"machines lost: {lost}; alive: {alive}"

    async def _no_room(self, needs: str) -> GrpoDistError:
        if self.own:
            return GrpoDistError(
                f"this machine has had no room for {needs} for {self.wait_minutes:g} minutes, and to the run's own "
                "cluster no other one comes. Start the same command again: it goes on from the last checkpoint"
            )
        return GrpoDistError(
            f"no machine has room in place of a lost one, {WAIT_KEY}={self.wait_minutes:g} minutes after it was lost: "
            f"{needs}; {await self._situation()}. Start Ray on another machine (`ray start --address=...`) or ask for "
            "less (trainer.nnodes, trainer.n_gpus_per_node, cluster.*); the same command then goes on from the last "
            f"checkpoint. Where machines come back later than that, raise {WAIT_KEY}"
        )


def node_name(node: Mapping[str, Any]) -> str:
    """HOST (ADDRESS) of one of Ray's records of nodes, for messages."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _needs(role: str, bundles: Sequence[Bundle]) -> str:
    return amounts((role, bundle.num_cpus, bundle.num_gpus) for bundle in bundles)


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

        `node_id` is Ray's id of its node, "" if that is not known.

        Raises:
            GrpoDistError: `error`, which says how it was lost, if no replacement is left.
        """
        self.spend(error, node_id, await self.nodes.dead())

    def spend(self, error: GrpoDistError, node_id: str, dead: Mapping[str, str]) -> None:
        """Count one replacement; `dead` has the lost machines by node id. Raises as `judge`."""
        if node_id in dead:
            error.add_note(f"its machine is lost: {dead[node_id]}")
        node_ids = [*self._node_ids, node_id]
        self.note_machine(node_id, dead)
        if sum(node not in dead for node in node_ids) + len(dead.keys() & set(node_ids)) > self.most:
            if self.most:
                error.add_note(f"trainer.max_worker_restarts={self.most} faults have already been made good")
            raise error
        self.failures.append(f"{error}; its machine is lost: {dead[node_id]}" if node_id in dead else str(error))
        self._node_ids = node_ids

    def note_machine(self, node_id: str, dead: Mapping[str, str]) -> None:
        """Note where a worker was lost, without counting a fault: what it has answered is lost with its machine."""
        self._places.add(node_id)
        self.machines_lost = len(dead.keys() & self._places)
