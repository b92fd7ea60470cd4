"""Ray's verdict on nodes, with sockets in place of nodes; the wait for room; and the restart budget."""

import asyncio
import socket
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any
from unittest.mock import Mock, call

import pytest
import ray

from grpo_dist.errors import ConfigError, GrpoDistError, WorkerLost
from grpo_dist.plan.placement import slots_of
from grpo_dist.runtime import nodes
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.nodes import Nodes, RestartBudget
from grpo_dist.runtime.resources import Bundle
from tests.messages import refuses, says
from tests.workers.services import Service

BUNDLE = Bundle(2.0, 1.0, "a", 0)
TWO = "rollout 2 x (2 CPU, 1 GPU)"
LEFT = "host1 (127.0.0.1)"  # of the nodes that are none, the one that is lost


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


@pytest.fixture
def listening() -> Iterator[int]:
    service = Service()
    yield service.place[1]
    service.close()


@pytest.fixture
def silent() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def node(number: int, port: int, *, alive: bool = True) -> dict[str, Any]:
    place = {"Address": "127.0.0.1", "Port": port, "Hostname": f"host{number}"}
    manager = {f"NodeManager{name}": value for name, value in place.items()}
    room = {"CPU": 4.0, "GPU": 1.0} if alive else {}
    return {"NodeID": f"node{number}", "Alive": alive, "Resources": room, **manager}


def cluster(monkeypatch: pytest.MonkeyPatch, *looks: list[dict[str, Any]]) -> Mock:
    """What Ray tells at each look, the last for ever."""
    look = Mock(side_effect=chain(looks, repeat(looks[-1])))
    monkeypatch.setattr(ray, "nodes", look)
    return look


def placed(monkeypatch: pytest.MonkeyPatch, after: int) -> Mock:
    """Room is there after so many looks for it."""
    look = Mock(side_effect=chain([False] * after, repeat(True)))
    monkeypatch.setattr(nodes, "is_placed", look)
    return look


# --- which are dead ------------------------------
def test_whoever_does_not_answer_is_waited_for_until_it_is_dead_or_answers_again(
    monkeypatch: pytest.MonkeyPatch, listening: int, silent: int
) -> None:
    there, dying, dead = node(0, listening), node(1, silent), node(1, silent, alive=False)
    for looks, found in (
        ([[there, dead]], {"node1": LEFT}),
        ([[there, dying], [there, dying], [there, dying], [there, dead]], {"node1": LEFT}),
        ([[node(0, silent)], [node(0, silent)], [there]], {}),
    ):
        look = cluster(monkeypatch, *looks)
        assert run(Nodes().dead()) == found
        assert look.call_count == len(looks)
    monkeypatch.setattr(nodes, "VERDICT_TIMEOUT_S", 0.05)
    cluster(monkeypatch, [dying])
    assert run(Nodes().dead()) == {}, "the wait for a verdict has an end"


async def test_the_loop_goes_on_while_ray_is_asked(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    loop, turned = asyncio.get_running_loop(), []

    async def turn() -> None:
        turned.append(True)

    def nodes_once_the_loop_has_turned() -> list[dict[str, Any]]:
        asyncio.run_coroutine_threadsafe(turn(), loop).result(timeout=30)
        return [node(0, listening)]

    monkeypatch.setattr(ray, "nodes", nodes_once_the_loop_has_turned)
    await Nodes().dead()
    assert turned


# --- room ------------------------------
def test_room_is_waited_for_and_the_wait_is_told(monkeypatch: pytest.MonkeyPatch, listening: int, silent: int) -> None:
    """A role that goes on with other processes has time; one without has the minutes of the key."""
    cluster(monkeypatch, [node(0, listening), node(1, silent, alive=False)])
    monkeypatch.setattr(nodes, "RESCHEDULED_S", 0.02)
    placed, told = set[str](), list[str]()
    monkeypatch.setattr(nodes, "is_placed", placed.__contains__)
    bundles = [BUNDLE, Bundle(2.0, 1.0, "b", 0)]

    def some_left() -> bool:
        placed.update("ab" if told else "")
        return True

    run(Nodes(0.0, told.append).wait_for_room("rollout", bundles, some_left))
    assert len(told) == 1
    placed.remove("b")
    with refuses(GrpoDistError, TWO, LEFT, "trainer.node_wait_minutes=0"):
        run(Nodes(0.0, told.append).wait_for_room("rollout", bundles))
    for line in told:
        says(line, TWO, LEFT, "1 with 4 CPU and 1 GPU")


def test_what_is_not_required_waits_without_a_word_or_an_end_and_gives_way_to_a_role_without_a_process(
    monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    cluster(monkeypatch, [node(0, listening)])
    monkeypatch.setattr(nodes, "RESCHEDULED_S", 0.0)
    extra, given, told = Bundle(2.0, 1.0, "b", 0, placed=False, required=False), list[str](), list[str]()

    def wait(bundle: Bundle, *, others: bool, minutes: float = 1.0) -> None:
        looks = placed(monkeypatch, after=20)
        there = Nodes(minutes, told.append)
        there.give_way.append(lambda: given.append(bundle.group))
        run(there.wait_for_room("ref", [bundle], lambda: others))
        assert looks.call_count == 21, "it looked until there was room"

    wait(extra, others=False, minutes=0.0)
    assert told == []
    wait(BUNDLE, others=True)
    assert given == []
    wait(BUNDLE, others=False)
    assert given == ["a"]


def test_a_run_that_starts_again_waits_for_room(monkeypatch: pytest.MonkeyPatch, listening: int, silent: int) -> None:
    cluster(monkeypatch, [node(0, listening), node(1, silent, alive=False)])
    slots = slots_of({"rollout": [0, 1]}, {"rollout": (2.0, 1.0)})
    told, too_little = list[str](), ConfigError("too little")
    reserve = Mock(side_effect=[too_little, too_little, ([], {}), too_little])
    monkeypatch.setattr(nodes, "reserve", reserve)
    assert run(Nodes(30.0, told.append).reserve_again(slots)) == ([], {})
    assert reserve.call_args_list == [call(slots, timeout_s=nodes.RESCHEDULED_S, one_is_enough=True)] * 3
    says(told[0], LEFT)
    with refuses(GrpoDistError, TWO, LEFT, "trainer.node_wait_minutes=0"):
        run(Nodes().reserve_again(slots))
    assert reserve.call_count == 4, "once more"


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
        run(there.wait_for_room("rollout", [BUNDLE]))
    assert (told, given) == ([], [True])


async def test_who_has_left_ray_asks_it_nothing(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    """Any call would start another cluster: when the run has ended its workers, and when Ray is shut down."""
    looks, rooms = cluster(monkeypatch, [node(0, listening)]), placed(monkeypatch, after=0)
    closed, open_one = Nodes(), Nodes()
    closed.close()
    for there in (closed, open_one):
        for question in (there.dead(), there.has_room(BUNDLE), there.wait_for_room("rollout", [BUNDLE])):
            with pytest.raises(asyncio.CancelledError):
                await question
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert looks.call_count == rooms.call_count == 0


# --- the budget ------------------------------
GONE = {"b": "host1 (10.0.0.2)"}


def lost(rank: int) -> WorkerLost:
    return WorkerLost("its process died", "reward", rank, "node0", "score")


def test_a_lost_machine_is_one_fault() -> None:
    """Also if a worker was lost before Ray knew; one that was lost and is not required is noted and not counted."""
    budget = RestartBudget(2)
    for node_id in "ba":
        budget.note_machine(node_id, GONE)
    assert (budget.machines_lost, budget.failures) == (1, [])
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
    says("\n".join(caught.value.__notes__), "host2 (10.0.0.3)", "trainer.max_worker_restarts=2")
