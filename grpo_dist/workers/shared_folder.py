"""Checks that the nodes of a run share the run directory: ranks and reward processes write into it, wherever they are.

Each node is asked by a Ray task, before any worker is started there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.workers.probe import ask_nodes
from grpo_dist.workers.resources import nodes_in_order

# A live node answers within seconds. One that does not is named when its workers do not start.
ANSWER_TIMEOUT_S = 60.0


def check_shared(run_dir: Path, nodes: Collection[str]) -> None:
    """Check that nodes see a folder of the driver's machine, by a file that is in it meanwhile, and may write into it.

    Args:
        run_dir: the run directory, absolute.
        nodes: Ray's ids of the nodes; the driver's own is not asked.

    Raises:
        ConfigError: nodes do not; the message names all of them.
    """
    here, *others = nodes_in_order()
    asked = [node for node in others if node["NodeID"] in nodes]
    if not asked:
        return
    with tempfile.NamedTemporaryFile(prefix="seen_by_all_nodes.", dir=run_dir) as mark:
        answers = ask_nodes(folder_problem, [(node["NodeID"], mark.name) for node in asked], ANSWER_TIMEOUT_S)
    problems = [f"node {_name(node)} {answer}" for node, answer in zip(asked, answers, strict=True) if answer]
    if problems:
        raise ConfigError(
            f"trainer.default_local_dir={run_dir}: node {_name(here)} made this folder, but {'; '.join(problems)}. "
            "Checkpoints and samples are written into it on every node: set a folder on a disk that all nodes share"
        )


def folder_problem(mark: str) -> str:
    """What is wrong with the folder of a file on this node; "" if nothing is."""
    if not Path(mark).is_file():
        return "does not see it"
    return "" if os.access(Path(mark).parent, os.W_OK | os.X_OK) else "cannot write into it"


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
