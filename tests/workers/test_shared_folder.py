"""Which nodes are asked whether they see the run directory, and what is said of those that do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

from grpo_dist.errors import ConfigError
from grpo_dist.workers import shared_folder
from grpo_dist.workers.resources import nodes_in_order
from grpo_dist.workers.shared_folder import check_shared, folder_problem
from tests.messages import refuses

NODES = [{"NodeID": f"id{n}", "NodeManagerHostname": f"host{n}", "NodeManagerAddress": f"10.0.0.{n}"} for n in range(4)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four nodes that are none, the driver's first: host1 shares its disk, host2 does not, host3 may only read."""
    found: list[str] = []

    def ask(nodes: list[dict[str, Any]], mark: str) -> list[str]:
        assert folder_problem(mark) == ""
        found.extend(node["NodeID"] for node in nodes)
        problems = {"id2": "does not see it", "id3": "cannot write into it"}
        return [f"{shared_folder._name(n)} {problems[n['NodeID']]}" for n in nodes if n["NodeID"] in problems]

    monkeypatch.setattr(shared_folder, "nodes_in_order", lambda: NODES)
    monkeypatch.setattr(shared_folder, "_ask", ask)
    return found


def test_all_nodes_that_do_not_share_the_folder_are_named(asked: list[str], tmp_path: Path) -> None:
    key = f"trainer.default_local_dir={tmp_path}"
    with refuses(ConfigError, key, "host0 (10.0.0.0)", "host2 (10.0.0.2)", "host3 (10.0.0.3)", "share") as caught:
        check_shared(tmp_path, {"id0", "id1", "id2", "id3"})
    assert "host1" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "the mark is gone"


def test_only_the_nodes_of_the_run_are_asked(asked: list[str], tmp_path: Path) -> None:
    check_shared(tmp_path, {"id0", "id1"})
    assert asked == ["id1"]
    check_shared(tmp_path / "none", {"id0"})
    assert asked == ["id1"], "the driver's own node makes the folder"


def test_a_folder_on_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert folder_problem(str(mark)) == "does not see it"
    mark.touch()
    assert folder_problem(str(mark)) == ""
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != (tmp_path, os.W_OK | os.X_OK))
    assert folder_problem(str(mark)) == "cannot write into it"


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_node_answers_for_itself(tmp_path: Path) -> None:
    (node,) = nodes_in_order()
    here = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    assert shared_folder._ask([node], str(tmp_path / "mark")) == [f"{here} does not see it"]
    (tmp_path / "mark").touch()
    assert shared_folder._ask([node], str(tmp_path / "mark")) == []
    lost = dict(node, NodeID=ray.NodeID.from_random().hex())
    assert shared_folder._ask([lost], str(tmp_path / "mark")) == [], "its workers will tell"
