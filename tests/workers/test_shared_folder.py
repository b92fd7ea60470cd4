"""Which nodes are asked whether they see the run directory, and what is said of those that do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.workers import shared_folder
from grpo_dist.workers.shared_folder import check_shared, folder_problem
from tests.messages import refuses

NODES = [{"NodeID": f"id{n}", "NodeManagerHostname": f"host{n}", "NodeManagerAddress": f"10.0.0.{n}"} for n in range(5)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Five nodes that are none, the driver's first: host1 shares its disk, host2 does not, host3 may only read, host4
    does not answer.
    """
    found: list[str] = []

    def ask(question: Any, asked: list[tuple[str, str]], timeout_s: float) -> list[str | None]:
        assert [question(mark) for _, mark in asked] == [""] * len(asked)
        found.extend(node for node, _ in asked)
        return [{"id2": "does not see it", "id3": "cannot write into it", "id4": None}.get(node, "") for node in found]

    monkeypatch.setattr(shared_folder, "nodes_in_order", lambda: NODES)
    monkeypatch.setattr(shared_folder, "ask_nodes", ask)
    return found


def test_all_nodes_that_do_not_share_the_folder_are_named(asked: list[str], tmp_path: Path) -> None:
    key = f"trainer.default_local_dir={tmp_path}"
    with refuses(ConfigError, key, "host0 (10.0.0.0)", "host2 (10.0.0.2)", "host3 (10.0.0.3)", "share") as caught:
        check_shared(tmp_path, {"id0", "id1", "id2", "id3", "id4"})
    assert not any(host in str(caught.value) for host in ("host1", "host4"))
    assert asked == ["id1", "id2", "id3", "id4"]
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
