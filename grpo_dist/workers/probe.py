"""Asks nodes what no worker there need answer, such as the state of a worker's process by the kernel of its node.

When one of several ranks that work together is lost, all of them exceed their time limit; the lost one is the one that
is stopped, dead or gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:  # it imports torch, which the task's process on a node need not
    from grpo_dist.workers.process import Address

# A live node answers within a second or two, even if Ray must start a process there first.
PROBE_TIMEOUT_S = 20.0
# The state letters of /proc/PID/stat.
STATES = {"R": "running", "S": "waiting", "D": "waiting for a disk", "T": "stopped", "t": "stopped", "Z": "dead"}
LOST = ("stopped", "dead", "gone")


def process_state(pid: int) -> str:
    """One of "running", "waiting", "stopped", "dead" and "gone"; "unknown" on machines without /proc."""
    if not Path("/proc/self/stat").exists():
        return "unknown"
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return STATES.get(letter, "waiting")


def probe(addresses: Mapping[int, Address], timeout_s: float = PROBE_TIMEOUT_S) -> dict[int, str]:
    """The states of several workers' processes.

    Args:
        addresses: addresses of the workers, by rank.
        timeout_s: seconds to wait for other nodes.

    Returns:
        By rank the value of `process_state`, or "gone" if the node does not answer.
    """
    here = ray.get_runtime_context().get_node_id()
    states = {rank: process_state(each.pid) for rank, each in addresses.items() if each.node_id == here}
    others = {rank: (each.node_id, each.pid) for rank, each in addresses.items() if each.node_id != here}
    answers = ask_nodes(process_state, list(others.values()), timeout_s)
    return states | {rank: state or "gone" for rank, state in zip(others, answers, strict=True)}


def ask_nodes(question: Callable[[Any], str], asked: Sequence[tuple[str, Any]], timeout_s: float) -> list[str | None]:
    """Ask nodes something that any process there can see, each in a Ray task.

    Args:
        question: the function that a node runs.
        asked: Ray's id of each node, and the argument.
        timeout_s: seconds to wait.

    Returns:
        The answers in this order; None from a node that does not answer.
    """
    if not asked:
        return []
    task: Any = ray.remote(num_cpus=0, max_retries=0)(question)
    places = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id, _ in asked]
    refs = [
        task.options(scheduling_strategy=place).remote(argument)
        for place, (_, argument) in zip(places, asked, strict=True)
    ]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    answers: list[str | None] = []
    for ref in refs:
        try:
            answers.append(ray.get(ref) if ref in ready else None)
        except RayError:
            answers.append(None)
    return answers
