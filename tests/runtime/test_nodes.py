"""Ray's verdict on nodes, with sockets that answer or not in place of nodes; and the wait for room.

The restart budget, on nodes that are none.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from grpo_dist.errors import ConfigError, GrpoDistError, WorkerLost
from grpo_dist.plan.placement import slots_of
from grpo_dist.runtime import nodes
from grpo_dist.runtime.event_loop import blocking, run
from grpo_dist.runtime.nodes import Nodes, RestartBudget
from grpo_dist.runtime.resources import Bundle
from tests.messages import refuses, says
from tests.workers.services import Service

SLOTS = slots_of({"rollout": [0, 1]}, {"rollout": (2.0, 1.0)})


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a cluster."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


@pytest.fixture
def listening() -> Iterator[int]:
    """A port that answers."""
    service = Service()
    yield service.place[1]
    service.close()


@pytest.fixture
def silent() -> int:
    """A port that does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def node(number: int, port: int, *, alive: bool = True) -> dict[str, Any]:
    return {
        "NodeID": f"node{number}",
        "Alive": alive,
        "NodeManagerAddress": "127.0.0.1",
        "NodeManagerPort": port,
        "NodeManagerHostname": f"host{number}",
        "Resources": {"CPU": 4.0, "GPU": 1.0} if alive else {},
    }


def cluster(monkeypatch: pytest.MonkeyPatch, *looks: list[dict[str, Any]]) -> list[int]:
    """What Ray tells at each look, the last for ever; returns a list that grows with each look."""
    seen: list[int] = []

    def look() -> list[dict[str, Any]]:
        seen.append(len(seen))
        return looks[min(len(seen), len(looks)) - 1]

    monkeypatch.setattr(ray, "nodes", look)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)
    return seen


def test_where_every_node_answers_there_is_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch, listening: int, silent: int
) -> None:
    """A node that was lost long ago is dead, and need not answer."""
    looks = cluster(monkeypatch, [node(0, listening), node(1, silent, alive=False)])
    assert run(Nodes().dead()) == {"node1": "host1 (127.0.0.1)"}
    assert len(looks) == 1


def test_a_node_that_does_not_answer_is_waited_for_until_it_is_dead(
    monkeypatch: pytest.MonkeyPatch, listening: int, silent: int
) -> None:
    dying = [node(0, listening), node(1, silent)]
    looks = cluster(monkeypatch, dying, dying, dying, [node(0, listening), node(1, silent, alive=False)])
    assert run(Nodes().dead()) == {"node1": "host1 (127.0.0.1)"}
    assert len(looks) == 4


def test_a_node_that_answers_again_was_not_lost(monkeypatch: pytest.MonkeyPatch, listening: int, silent: int) -> None:
    looks = cluster(monkeypatch, [node(0, silent)], [node(0, silent)], [node(0, listening)])
    assert run(Nodes().dead()) == {}
    assert len(looks) == 3


def test_a_node_that_takes_connections_and_hangs_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose raylet is stopped; Ray's verdict on it comes later."""
    monkeypatch.setattr(nodes, "CONNECT_TIMEOUT_S", 0.05)
    service = Service()
    service.hangs = True
    port = service.place[1]
    looks = cluster(monkeypatch, [node(0, port)], [node(0, port, alive=False)])
    assert run(Nodes().dead()) == {"node0": "host0 (127.0.0.1)"}
    assert len(looks) == 2
    service.close()


def test_the_wait_for_a_verdict_has_an_end(monkeypatch: pytest.MonkeyPatch, silent: int) -> None:
    monkeypatch.setattr(nodes, "VERDICT_TIMEOUT_S", 0.05)
    cluster(monkeypatch, [node(0, silent)])
    assert run(Nodes().dead()) == {}


def test_the_loop_goes_on_while_ray_is_asked(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    @blocking
    async def look() -> bool:
        loop, turned = asyncio.get_running_loop(), asyncio.Event()

        def nodes_once_the_loop_has_turned() -> list[dict[str, Any]]:
            asyncio.run_coroutine_threadsafe(turn(), loop).result(timeout=30)
            return [node(0, listening)]

        async def turn() -> None:
            turned.set()

        monkeypatch.setattr(ray, "nodes", nodes_once_the_loop_has_turned)
        await Nodes().dead()
        return turned.is_set()

    assert look()


def test_room_is_waited_for_and_the_wait_is_told(monkeypatch: pytest.MonkeyPatch, listening: int, silent: int) -> None:
    """A role that goes on with other processes has time; one without has the minutes of the key."""
    cluster(monkeypatch, [node(0, listening), node(1, silent, alive=False)])
    monkeypatch.setattr(nodes, "RESCHEDULED_S", 0.02)
    placed, told = set[str](), list[str]()
    monkeypatch.setattr(nodes, "is_placed", placed.__contains__)
    bundles = [Bundle(2.0, 1.0, "a", 0), Bundle(2.0, 1.0, "b", 0)]

    def some_left() -> bool:
        if told:
            placed.update("ab")
        return True

    run(Nodes(0.0, told.append).wait_for_room("rollout", bundles, some_left))
    assert len(told) == 1
    placed.remove("b")
    with refuses(GrpoDistError, "rollout 2 x (2 CPU, 1 GPU)", "host1 (127.0.0.1)", "trainer.node_wait_minutes=0"):
        run(Nodes(0.0, told.append).wait_for_room("rollout", bundles))
    for line in told:
        says(line, "rollout 2 x (2 CPU, 1 GPU)", "host1 (127.0.0.1)", "1 with 4 CPU and 1 GPU")


def test_what_is_not_required_is_waited_for_without_a_word_and_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "RESCHEDULED_S", 0.0)
    monkeypatch.setattr(nodes, "PATIENT_POLL_S", 0.0)
    looks, told = iter([False] * 20 + [True]), list[str]()
    monkeypatch.setattr(nodes, "is_placed", lambda group: next(looks))
    extra = Bundle(2.0, 1.0, "a", 0, placed=False, required=False)
    run(Nodes(0.0, told.append).wait_for_room("rollout", [extra]))
    assert told == []
    assert not any(looks), "it looked until there was room"


def test_a_role_without_a_process_is_given_way_to(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    """Not so by what is not required, or while the role has others."""
    cluster(monkeypatch, [node(0, listening)])
    monkeypatch.setattr(nodes, "RESCHEDULED_S", 0.0)
    for poll in ("POLL_S", "PATIENT_POLL_S"):
        monkeypatch.setattr(nodes, poll, 0.0)
    bundle, extra = Bundle(2.0, 1.0, "a", 0), Bundle(2.0, 1.0, "b", 0, required=False)
    given = list[str]()

    def wait(bundle: Bundle, *, others: bool) -> None:
        looks = iter([False] * 3 + [True])
        monkeypatch.setattr(nodes, "is_placed", lambda group: next(looks))
        there = Nodes(1.0)
        there.give_way.append(lambda: given.append(bundle.group))
        run(there.wait_for_room("ref", [bundle], lambda: others))

    wait(extra, others=False)
    wait(bundle, others=True)
    assert given == []
    wait(bundle, others=False)
    assert given == ["a"]


def test_a_run_that_starts_again_waits_for_room(monkeypatch: pytest.MonkeyPatch, listening: int, silent: int) -> None:
    cluster(monkeypatch, [node(0, listening), node(1, silent, alive=False)])
    asked: list[dict[str, Any]] = []

    def reserve(slots: Any, **how: Any) -> Any:
        asked.append(how)
        if len(asked) < 3:
            raise ConfigError("too little")
        return [], {}

    monkeypatch.setattr(nodes, "reserve", reserve)
    told: list[str] = []
    assert run(Nodes(30.0, told.append).reserve_again(SLOTS)) == ([], {})
    assert asked == [{"timeout_s": nodes.RESCHEDULED_S, "one_is_enough": True}] * 3
    says(told[0], "host1 (127.0.0.1)")
    asked.clear()
    with refuses(GrpoDistError, "rollout 2 x (2 CPU, 1 GPU)", "host1 (127.0.0.1)", "trainer.node_wait_minutes=0"):
        run(Nodes().reserve_again(SLOTS))
    assert len(asked) == 1


def test_a_runs_own_cluster_waits_for_no_other_machine(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    """What is killed may take a while to leave its room; whoever is not required gives way."""
    cluster(monkeypatch, [node(0, listening)])
    monkeypatch.setattr(nodes, "RESCHEDULED_S", 0.0)
    monkeypatch.setattr(nodes, "OWN_WAIT_MINUTES", 0.0)
    monkeypatch.setattr(nodes, "is_placed", lambda group: False)
    told, given = list[str](), list[bool]()
    there = Nodes(30.0, told.append, own=True)
    there.give_way.append(lambda: given.append(True))
    with refuses(GrpoDistError, "rollout 1 x (2 CPU, 1 GPU)", "same command"):
        run(there.wait_for_room("rollout", [Bundle(2.0, 1.0, "a", 0)]))
    assert (told, given) == ([], [True])


@pytest.mark.parametrize("left", ["the run has ended its workers", "Ray is shut down"])
async def test_who_has_left_ray_asks_it_nothing(left: str, monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    """Any call would start another cluster."""
    looks = cluster(monkeypatch, [node(0, listening)])
    monkeypatch.setattr(nodes, "is_placed", looks.append)
    there, bundle = Nodes(), Bundle(2.0, 1.0, "a", 0)
    if left == "Ray is shut down":
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
    else:
        there.close()
    for question in (there.dead(), there.has_room(bundle), there.wait_for_room("rollout", [bundle])):
        with pytest.raises(asyncio.CancelledError):
            await question
    assert looks == []


GONE = {"b": "host1 (10.0.0.2)"}


def lost(rank: int) -> WorkerLost:
    return WorkerLost("its process died", "reward", rank, "node0", "score")


def test_the_one_after_the_last_is_raised_and_says_so() -> None:
    budget = RestartBudget(2)
    for rank in range(2):
        budget.spend(lost(rank), "a", {})
    assert budget.failures == [str(lost(rank)) for rank in range(2)]
    with pytest.raises(WorkerLost, match="reward worker 2 on node0") as caught:
        budget.spend(lost(2), "a", {})
    assert caught.value.__notes__ == ["trainer.max_worker_restarts=2 faults have already been made good"]
    assert len(budget.failures) == 2


def test_without_a_budget_the_first_is_raised_as_it_is() -> None:
    with pytest.raises(WorkerLost) as caught:
        RestartBudget().spend(lost(0), "", {})
    assert not hasattr(caught.value, "__notes__")


def test_a_lost_machine_is_one_fault() -> None:
    """Also if one of its workers was lost before Ray knew; a process that died elsewhere is another one."""
    budget = RestartBudget(2)
    budget.spend(lost(0), "b", {})
    for rank in (1, 2, 3):
        budget.spend(lost(rank), "b", GONE)
    assert [GONE["b"] in failure for failure in budget.failures] == [False, True, True, True]
    assert budget.machines_lost == 1
    budget.spend(lost(4), "a", GONE)
    with pytest.raises(WorkerLost):
        budget.spend(lost(5), "a", GONE)
    budget.spend(lost(6), "b", GONE)
    with pytest.raises(WorkerLost) as caught:
        budget.spend(lost(7), "c", GONE | {"c": "host2 (10.0.0.3)"})
    assert "its machine is lost: host2 (10.0.0.3)" in caught.value.__notes__


def test_where_a_worker_was_lost_that_is_not_required_is_noted_and_not_counted() -> None:
    budget = RestartBudget(1)
    budget.note_machine("b", GONE)
    budget.note_machine("a", GONE)
    assert (budget.machines_lost, budget.failures) == (1, [])
    budget.spend(lost(0), "b", GONE)
    assert (budget.machines_lost, len(budget.failures)) == (1, 1)
    with pytest.raises(WorkerLost):
        budget.spend(lost(1), "a", GONE)
