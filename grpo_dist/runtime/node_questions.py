"""Asks nodes, each in a Ray task, what no worker there need answer: the state of a process, if a folder is shared.

When one of several ranks that work together is lost, all of them exceed their time limit; the lost one is the one whose
process the kernel of its node calls stopped, dead or gone. And ranks and reward processes write into the run directory
wherever they are, so all nodes must see it before any worker is started there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_dist.errors import ConfigError
from grpo_dist.runtime.nodes import node_name
from grpo_dist.runtime.resources import nodes_in_order
from grpo_dist.supervisor import process_state

if TYPE_CHECKING:
    from grpo_dist.runtime.process import Address


# A live node answers within a second or two, even if Ray must start a process there first.
ANSWER_S = 20.0
LOST = ("stopped", "dead", "gone")


def process_states(addresses: Mapping[int, Address], timeout_s: float = ANSWER_S) -> dict[int, str]:
    """Return by rank the value of `process_state`, or "gone" if another node does not answer within `timeout_s`."""
    here = ray.get_runtime_context().get_node_id()
    states = {rank: process_state(address.pid) for rank, address in addresses.items() if address.node_id == here}
    others = {rank: (address.node_id, address.pid) for rank, address in addresses.items() if address.node_id != here}
    answers = ask_nodes(process_state, list(others.values()), timeout_s)
    return states | {rank: state or "gone" for rank, state in zip(others, answers, strict=True)}


def ask_nodes(question: Callable[[Any], str], asked: Sequence[tuple[str, Any]], timeout_s: float) -> list[str | None]:
    """Ask nodes something that any process there can see, each in a Ray task.

    Args:
        question: the function that a node runs.
        asked: Ray's id of each node, and the argument.
        timeout_s: seconds after which the answer of a node is None.
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


# A live node answers within seconds. One that does not is named when its workers do not start.
ANSWER_TIMEOUT_S = 60.0


def check_shared(run_dir: Path, nodes: Collection[str]) -> None:
    """Check that nodes see a folder of the driver's machine, by a file that is in it meanwhile, and may write into it.

    Args:
        run_dir: the run directory, absolute.
        nodes: Ray's ids of the nodes; the driver's own is not asked.
    """
    here, *others = nodes_in_order()
    asked = [node for node in others if node["NodeID"] in nodes]
    if not asked:
        return
    with tempfile.NamedTemporaryFile(prefix="seen_by_all_nodes.", dir=run_dir) as mark:
        answers = ask_nodes(folder_problem, [(node["NodeID"], mark.name) for node in asked], ANSWER_TIMEOUT_S)
    problems = [f"node {node_name(node)} {answer}" for node, answer in zip(asked, answers, strict=True) if answer]
    if problems:
        raise ConfigError(
            f"trainer.default_local_dir={run_dir}: node {node_name(here)} made this folder, but {'; '.join(problems)}. "
            "Checkpoints and samples are written into it on every node: set a folder on a disk that all nodes share"
        )


def folder_problem(mark: str) -> str:
    """Return what is wrong with the folder of a file on this node; "" if nothing is."""
    if not Path(mark).is_file():
        return "does not see it"
    return "" if os.access(Path(mark).parent, os.W_OK | os.X_OK) else "cannot write into it"
