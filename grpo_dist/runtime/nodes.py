"""The Ray cluster of a run once Ray is imported: joined or started, watched, and its machines that fail.

What is watched is Ray itself: its control service (GCS), and the raylet of the driver's machine. Without the control
service Ray's calls hang, and after a minute Ray ends the driver with a text of its own. Without the raylet calls fail
one after the other, and the workers that were its children stay behind. So do workers on other machines, for minutes,
where the machine of the control service is gone without a word: each watches it too.

Of other machines the question is whether a worker was lost alone or with its machine, and where there is room for what
replaces it. Ray calls a node dead once its health check has failed for a while (up to a minute), and until then places
replacements on it. So whoever replaces a worker first waits until every node answers or is dead (`Nodes.dead`). By then
Ray looks for another node for the placement groups that were on it, and a worker is started when its group has found
one (`Nodes.has_room`).

The restart budget says how many workers may be replaced before the run stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private import services, worker

from grpo_dist.config.processor import logical_cpus
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.runtime.cluster import LOCAL, answers, local_folder, no_cluster
from grpo_dist.runtime.resources import Bundle, amounts, is_placed, machine_sizes, release, requested, reserve
from grpo_dist.supervisor import adopt_orphans

if TYPE_CHECKING:
    from grpo_dist.plan.placement import Slot

START_ATTEMPTS = 3
# Checks in a row that fail before something counts as lost: several seconds, and half a minute where it hangs or its
# whole machine is gone. Counted and not timed, because the driver itself may have been stopped meanwhile.
FAILED_CHECKS = 8
PERIOD_S, ANSWER_TIMEOUT_S = 1.0, 2.0
# Of workers, since there may be hundreds.
WORKER_PERIOD_S = 5.0

# Host and port by what is there.
Places = dict[str, tuple[str, int]]


def connect(address: str, num_cpus: int | None) -> str:
    """Join or start a Ray cluster; returns a message that says which one is used.

    Args:
        address: what `cluster.prepare` has returned.
        num_cpus: logical CPUs of a local cluster; None: all that this process may use.
    """
    if address == LOCAL:
        return _start_local(num_cpus)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise no_cluster(address, error) from None
    except (ray.exceptions.RayError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if "authentic" in reason.lower():
            raise ConfigError(
                f"ray_kwargs.ray_init.address={address}: the cluster refused this run: {reason}\n"
                "`ray start` turns on a token by itself where it finds one (RAY_AUTH_TOKEN, or ~/.ray/auth_token, "
                "which an earlier local Ray may have made), and the programs that join do not. Set RAY_AUTH_MODE=token "
                "here, and in front of `ray job submit`, with the token of the cluster's machines; or, inside a "
                "network of your own, start the cluster with RAY_AUTH_MODE=disabled"
            ) from None
        if "version" in reason.lower():
            remedy = "run this with the cluster's Ray and Python, or start the cluster with those of this process"
            raise ConfigError(f"ray_kwargs.ray_init.address={address}: {reason}; {remedy}") from None
        raise
    return f"joined the Ray cluster at {address}"


def is_own() -> bool:
    """Return whether this process has started the cluster that it is connected to."""
    node: Any = worker._global_node
    return node is not None and node.is_head()


def _start_local(num_cpus: int | None) -> str:
    folder = str(_private_folder())
    adopt_orphans()  # workers whose raylet was killed can then be found and ended (`kill_ray`)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _in_own_process_groups():
                ray.init(
                    address=LOCAL,
                    num_cpus=num_cpus or logical_cpus(),  # Ray itself sees no limit of a job below the top
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=folder,
                )
            break
        except Exception as error:
            # Ray waits 30 s for its own processes, which may not be enough on a busy machine; it has no setting for it
            ray.shutdown()
            if attempt == START_ATTEMPTS or "timed out during startup" not in str(error):
                raise GrpoDistError(f"Ray could not be started on this machine: {error}") from error
    return "started a local Ray cluster on 127.0.0.1"


def _private_folder() -> Path:
    """Make the folder of this user's local clusters, in one that nobody else can enter: Ray opens its own to all."""
    private = local_folder().parent
    try:
        private.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"no folder for the local Ray cluster: {error}; set RAY_TMPDIR to another one") from None
    status = private.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{private}: the local Ray cluster keeps its sockets and logs here, and this is not a folder that nobody "
            f"but this user can enter. Remove it, or `chmod 700 {private}`, or set RAY_TMPDIR to another folder"
        )
    return private / "r"


@contextlib.contextmanager
def _in_own_process_groups() -> Iterator[None]:
    """Start Ray's processes outside the run's process group, by patching the Popen class that Ray starts them with.

    The SIGTERM of a scheduler and the Ctrl-C of a terminal go to the whole process group, and would end Ray before the
    run has saved a checkpoint. Ray has no setting for this.
    """
    module: Any = services
    popen = module.ConsolePopen
    module.ConsolePopen = functools.partial(popen, process_group=0)
    try:
        yield
    finally:
        module.ConsolePopen = popen


# --- its loss -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def watching(on_lost: Callable[[str], None]) -> Iterator[None]:
    """Watch Ray while the block runs.

    Args:
        on_lost: called with what is lost, in a thread of its own, or in this one if an error ends the block first. By
            then calls of Ray may hang.
    """
    ended = threading.Event()
    places = ray_places()
    _start(places, on_lost, PERIOD_S, ended)
    try:
        yield
    except Exception:
        for what in [what for what, place in places.items() if not answers(place, ANSWER_TIMEOUT_S)][:1]:
            on_lost(what)
        raise
    finally:
        ended.set()


def end_with_ray() -> None:
    """Have this process end, if it is one of Ray's workers, once Ray's control service is lost."""
    if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        _start(_control_service(), lambda what: os._exit(1), WORKER_PERIOD_S, threading.Event())


def _start(places: Places, on_lost: Callable[[str], None], period_s: float, ended: threading.Event) -> None:
    """Watch these places in a thread until one is lost, or `ended` is set."""

    def watch() -> None:
        failed = dict.fromkeys(places, 0)
        while not ended.wait(period_s):
            for what, place in places.items():
                failed[what] = 0 if answers(place, ANSWER_TIMEOUT_S) else failed[what] + 1
                if failed[what] == FAILED_CHECKS and not ended.is_set():
                    on_lost(what)
                    return

    threading.Thread(target=watch, name="grpo_dist ray watch", daemon=True).start()


def ray_places() -> Places:
    """Return the services that the driver cannot do without, with its host and port."""
    context = ray.get_runtime_context()
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    ip, raylet = here["NodeManagerAddress"], here["NodeManagerPort"]
    return _control_service() | {f"Ray's node service (raylet) of this machine at {ip}:{raylet}": (ip, raylet)}


def _control_service() -> Places:
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return {f"Ray's control service (gcs_server) at {host}:{port}": (host.strip("[]"), int(port))}


def kill_ray() -> None:
    """Kill Ray's processes below this one, and what they have started."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if command.startswith("ray::") or "/ray/" in command:
                for member in [process, *process.children(recursive=True)]:
                    member.kill()


# --- machines that fail -------------------------------------------------------------------------------------------
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
    """The number of faults that the rollout, reward and reference workers of a run share."""

    most: int = 0  # `trainer.max_worker_restarts`
    nodes: Nodes = field(default_factory=Nodes)  # says which machines are lost, and where there is room
    failures: list[str] = field(default_factory=list)  # the error behind each replacement so far
    machines_lost: int = 0  # with workers
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
