"""What nodes are asked: the states of processes, and whether they see the run directory."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import ConfigError, WorkerError, WorkerLost
from grpo_dist.runtime import process
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.process import (
    LOST,
    Process,
    ask_nodes,
    check_shared,
    folder_problem,
    process_states,
)
from grpo_dist.supervisor import process_state
from tests.messages import refuses, says
from tests.processes import spawned


class Sleeper(Process):
    """Sleeps, or fails as a rank does whose peer is gone."""

    def sleep_long(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture(scope="module")
def group(local_ray: None) -> Iterator[WorkerGroup]:
    with spawned("actor", Sleeper, [(), (), (), ()]) as group:
        run(group.call_home())
        yield group


@pytest.mark.deep
@pytest.mark.ray
def test_the_rank_that_is_gone_is_named_rather_than_the_one_that_noticed(group: WorkerGroup) -> None:
    with refuses(WorkerError, "actor worker 0", "'update'", "RuntimeError") as caught:
        group.call(0, "update", "fail")
    assert not isinstance(caught.value, WorkerLost), "all ranks are there: it is this one's own mistake"
    os.kill(group.addresses[3].pid, signal.SIGKILL)
    while process_state(group.addresses[3].pid) not in ("gone", "dead"):
        time.sleep(0.05)
    with refuses(WorkerLost, "actor worker 3", "'update'", "process") as lost:
        group.call(0, "update", "fail")
    says(lost.value.__notes__[0], "actor worker 0", "RuntimeError")


@pytest.mark.deep
@pytest.mark.ray
def test_a_node_that_is_not_there_has_lost_its_processes(group: WorkerGroup) -> None:
    elsewhere = replace(group.addresses[0], node_id="e" * 56)
    found = process_states({0: elsewhere, 1: group.addresses[0]}, timeout_s=1.0)
    assert found[0] == "gone"
    assert found[1] not in LOST


@pytest.mark.deep
@pytest.mark.ray
def test_nodes_answer_in_the_order_in_which_they_are_asked(group: WorkerGroup) -> None:
    here, nowhere = group.addresses[0].node_id, "e" * 56
    asked = [(here, os.getpid()), (nowhere, os.getpid()), (here, 2**22 + 1)]
    first, second, third = ask_nodes(process_state, asked, timeout_s=60.0)
    assert first not in (None, *LOST)
    assert (second, third) == (None, "gone")


@pytest.mark.deep
@pytest.mark.ray
def test_a_rank_that_is_stopped_or_gone_is_named_rather_than_those_that_wait_for_it(group: WorkerGroup) -> None:
    node, pids = group.addresses[0].host, {rank: address.pid for rank, address in group.addresses.items()}
    calls = group.submit_all("update", "sleep_long", 60.0)
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(pids[2], signal.SIGKILL)
    while process_state(pids[2]) not in ("gone", "dead"):
        time.sleep(0.05)
    while process_state(pids[1]) != "stopped":  # the kernel takes its time on a busy machine
        time.sleep(0.05)
    states = process_states(group.addresses)
    assert states[0] not in LOST
    assert states[1] == "stopped"
    assert states[2] in ("gone", "dead")

    late = run(group.late(calls[:2], 5.0))
    assert isinstance(late, WorkerLost)
    assert (late.role, late.rank, late.node, late.stage) == ("actor", 1, node, "update")
    says(late, "5 s", "stopped", "late too")
    assert re.search("running|waiting", str(run(group.late(calls[:1], 5.0))))


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

    monkeypatch.setattr(process, "nodes_in_order", lambda: NODES)
    monkeypatch.setattr(process, "ask_nodes", ask)
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
