"""Reads the state of a worker's process from the kernel of its node, since the worker itself may not answer.

When one of several ranks that work together is lost, all of them exceed their time limit; the lost one is the one that
is stopped, dead or gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
    states, asked = {}, {}
    for rank, address in addresses.items():
        if address.node_id == here:
            states[rank] = process_state(address.pid)
        else:
            place = NodeAffinitySchedulingStrategy(address.node_id, soft=False)
            ask = ray.remote(num_cpus=0, max_retries=0)(process_state)
            asked[rank] = ask.options(scheduling_strategy=place).remote(address.pid)
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    for rank, ref in asked.items():
        try:
            states[rank] = ray.get(ref) if ref in ready else "gone"
        except RayError:
            states[rank] = "gone"
    return states
