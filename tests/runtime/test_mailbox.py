"""Requests that share calls, and answers that come back together; the worker is in this process.

What Ray's errors mean. Those of real processes: test_group.py.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from ray.exceptions import ObjectLostError, RayTaskError

from grpo_dist.errors import ConfigError, DataLost, GrpoDistError, WorkerError, WorkerLost
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.call import failure
from grpo_dist.runtime.mailbox import Mailbox, Postbox
from tests.messages import refuses, says
from tests.runtime.fakes import Fakes


class Worker(Mailbox):
    """Answers a number with its double, and as many rows; once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def double(self, number: int) -> tuple[int, DataProto | None]:
        if number < 0:
            raise ConfigError("negative") if number == -1 else ValueError("a mistake")
        await self.gate.wait()
        data = DataProto.from_dict({"x": torch.full((number,), number)}) if number else None
        return 2 * number, data


class Group(Fakes):
    """Its worker is in this process; `asked` has the numbers of requests."""

    def __init__(self) -> None:
        super().__init__("rollout", 1)
        self.worker, self.is_lost = Worker(), asyncio.Event()

    def submit(self, rank: int, stage: str, method: str, box: str, requests: list) -> Any:
        self.tell(rank, method, len(requests))
        running = asyncio.ensure_future(getattr(self.worker, method)(box, requests))
        return SimpleNamespace(running=running, data=SimpleNamespace())

    submit_for_data = submit

    async def value(self, call: Any) -> Any:
        loss = asyncio.ensure_future(self.is_lost.wait())
        await asyncio.wait([call.running, loss], return_when=asyncio.FIRST_COMPLETED)
        if loss.done():
            raise self.lost(0, "generate", "its process died")
        loss.cancel()
        found = call.running.result()
        if found is None:
            return None
        outcomes, call.data.rows = found
        return outcomes


def make() -> tuple[Group, Postbox]:
    group = Group()
    return group, Postbox(group, 0, "generate")


async def answers(*posted: Any) -> list[Any]:
    return list(await asyncio.gather(*posted, return_exceptions=True))


async def test_requests_of_one_turn_travel_together_and_so_do_their_answers() -> None:
    group, box = make()
    posted = [box.post("double", (number,)) for number in (2, 0, 1)]
    assert not group.asked, "not before the loop's next turn"
    await asyncio.sleep(0)
    assert group.asked == [("collect", 0, 3)]
    group.worker.gate.set()
    found = await answers(*posted)
    assert [answer for answer, *_ in found] == [4, 0, 2]
    data = found[0][1]
    assert all(each[1] is data for each in found)
    assert [each[2] for each in found] == [0, 2, 2], "where their rows begin"
    assert data.rows["x"].tolist() == [2, 2, 1]
    assert group.asked == [("collect", 0, 3)]
    box.post("double", (3,))
    await asyncio.sleep(0)
    assert group.asked[1:] == [("collect", 0, 1)], "it begins again"


async def test_what_is_posted_while_others_are_awaited_is_taken_at_once() -> None:
    group, box = make()
    first = box.post("double", (1,))
    await asyncio.sleep(0)
    second = [box.post("double", (number,)) for number in (2, 3)]
    box.flush()
    await asyncio.sleep(0)
    assert group.asked == [("collect", 0, 1), ("take", 0, 2)]
    group.worker.gate.set()
    assert [answer for answer, *_ in await answers(first, *second)] == [2, 4, 6]


async def test_an_error_belongs_to_its_own_request() -> None:
    group, box = make()
    group.worker.gate.set()
    refused, good, mistaken = await answers(*(box.post("double", (number,)) for number in (-1, 1, -2)))
    assert isinstance(refused, ConfigError)
    assert good[0] == 2
    assert isinstance(mistaken, WorkerError)
    assert "ValueError: a mistake" in mistaken.message
    assert "in double" in mistaken.remote_traceback


async def test_a_process_that_dies_fails_all_that_is_open() -> None:
    group, box = make()
    posted = [box.post("double", (1,))]
    await asyncio.sleep(0)
    posted.append(box.post("double", (2,)))
    group.is_lost.set()
    assert [type(each) for each in await answers(*posted)] == [WorkerLost, WorkerLost]


async def test_nothing_is_sent_to_a_process_that_was_replaced() -> None:
    group, box = make()
    posted = box.post("double", (1,))
    group.handles[0] = "another"
    with refuses(GrpoDistError, "rollout worker 0", "replaced"):
        await posted
    assert not group.asked


WHERE = ("reward", 1, "node2", "score")


def test_data_that_were_in_a_lost_machine_are_not_the_fault_of_who_needs_them() -> None:
    """Its worker is not replaced; where the answer itself is lost, it is asked again as of a lost worker."""
    gone = ObjectLostError("ab" * 28, b"", "")
    needed = failure(RayTaskError("score", "traceback", gone).as_instanceof_cause(), *WHERE)
    assert isinstance(needed, DataLost)
    says(needed, "reward worker 1 on node2", "'score'", "machine")
    answer = failure(gone, *WHERE)
    assert isinstance(answer, WorkerLost)
    assert (answer.role, answer.rank, answer.node, answer.stage) == WHERE
