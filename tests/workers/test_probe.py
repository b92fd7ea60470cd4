import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from grpo_dist.errors import WorkerError, WorkerLost
from grpo_dist.workers.event_loop import run
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.probe import LOST, ask_nodes, probe, process_state
from grpo_dist.workers.process import Process
from tests.messages import refuses, says
from tests.processes import spawned

pytestmark = pytest.mark.ray


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


def test_a_node_that_is_not_there_has_lost_its_processes(group: WorkerGroup) -> None:
    elsewhere = replace(group.addresses[0], node_id="e" * 56)
    found = probe({0: elsewhere, 1: group.addresses[0]}, timeout_s=1.0)
    assert found[0] == "gone"
    assert found[1] not in LOST


def test_nodes_answer_in_the_order_in_which_they_are_asked(group: WorkerGroup) -> None:
    here, nowhere = group.addresses[0].node_id, "e" * 56
    asked = [(here, os.getpid()), (nowhere, os.getpid()), (here, 2**22 + 1)]
    first, second, third = ask_nodes(process_state, asked, timeout_s=60.0)
    assert first not in (None, *LOST)
    assert (second, third) == (None, "gone")


def test_a_rank_that_is_stopped_or_gone_is_named_rather_than_those_that_wait_for_it(group: WorkerGroup) -> None:
    node, pids = group.addresses[0].host, {rank: address.pid for rank, address in group.addresses.items()}
    calls = group.submit_all("update", "sleep_long", 60.0)
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(pids[2], signal.SIGKILL)
    while process_state(pids[2]) not in ("gone", "dead"):
        time.sleep(0.05)
    while process_state(pids[1]) != "stopped":  # the kernel takes its time on a busy machine
        time.sleep(0.05)
    states = probe(group.addresses)
    assert states[0] not in LOST
    assert states[1] == "stopped"
    assert states[2] in ("gone", "dead")

    late = run(group.late(calls[:2], 5.0))
    assert isinstance(late, WorkerLost)
    assert (late.role, late.rank, late.node, late.stage) == ("actor", 1, node, "update")
    says(late, "5 s", "stopped", "late too")
    assert re.search("running|waiting", str(run(group.late(calls[:1], 5.0))))
