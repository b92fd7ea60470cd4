"""Calls of a group whose processes are none, requests that share them, and the driver's loop."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ray.exceptions import ObjectLostError, RayTaskError

from grpo_dist.errors import ConfigError, DataLost, GrpoDistError, WorkerError, WorkerLost
from grpo_dist.protocol import DataProto
from grpo_dist.runtime import call as module
from grpo_dist.runtime import group as module_of_groups
from grpo_dist.runtime.call import BusyClock, failure
from grpo_dist.runtime.event_loop import TimeLimits, blocking, run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.mailbox import Mailbox, Postbox
from tests.messages import refuses, says
from tests.ranks import run_ranks
from tests.runtime.fakes import Fakes, Held


def group(*handles: Any) -> WorkerGroup:
    return WorkerGroup("actor", handles, TimeLimits(60.0))


def working(*answers: Future[Any]) -> Any:
    """As one of Ray's actor handles: its calls have these answers in turn, and their arguments as data."""
    left = iter(answers)

    def remote(*args: Any) -> Any:
        answer = next(left)
        return SimpleNamespace(future=lambda: answer)

    def options(num_returns: int) -> Any:
        return SimpleNamespace(remote=lambda *args: (remote(*args), args))

    return SimpleNamespace(work=SimpleNamespace(remote=remote, options=options))


async def test_a_call_has_the_answer_and_the_data_of_its_process() -> None:
    answers = [Future[Any](), Future[Any]()]
    workers = group(working(answers[0]), working(answers[1]))
    call, other = workers.submit_for_data(0, "update", "work", "rows"), workers.submit(1, "memory", "work")
    for answer in answers:
        answer.set_result(answers.index(answer))
    assert (await other.answer(), await call.answer(), call.data) == (1, 0, ("rows",))
    assert call.is_current
    workers.handles[0] = working()
    assert not call.is_current, "it was replaced"
    with refuses(WorkerLost, "actor"):
        await group(None).submit(0, "update", "update").answer()


async def test_a_wait_that_is_cancelled_leaves_the_call() -> None:
    answer = Future[int]()
    call = group(working(answer)).submit(0, "slow", "work")
    first = asyncio.create_task(call.answer())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    answer.set_result(1)
    assert await call.answer() == 1


async def test_open_calls_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from 1 to 4 and from 3 to 6, on top of 10 s before: 5 s more; then idle, then busy again from 8 on."""
    now = [1.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    answers = [Future[int](), Future[int](), Future[int]()]
    workers = group(working(*answers))
    workers._busy[0] = BusyClock(10.0)
    first = workers.submit(0, "work", "work")
    now[0] = 3.0
    second = workers.submit(0, "work", "work")
    now[0] = 4.0
    answers[0].set_result(1)
    await first.answer()
    assert workers.busy_seconds() == 13.0
    now[0] = 6.0
    answers[1].set_result(1)
    await second.answer()
    now[0] = 8.0
    assert workers.busy_seconds() == 15.0
    workers.submit(0, "work", "work")
    now[0] = 8.5
    assert workers.busy_seconds() == 15.5


async def test_an_answer_that_nobody_holds_is_gone_at_once() -> None:
    """Not only when Python looks for cycles: what it refers to in the object store, such as weights, stays with it."""

    class Weights:
        pass

    pending: list[Future[Any]] = [Future()]
    asyncio.get_running_loop().call_later(0.01, pending[0].set_result, Weights())
    remote = SimpleNamespace(remote=lambda: SimpleNamespace(future=pending.pop))
    gc.disable()
    try:
        answer = weakref.ref(await group(SimpleNamespace(update=remote)).ask(0, "update", "update"))
        await asyncio.sleep(0.05)  # callbacks of the answer, which hold it, may still run
        assert answer() is None
    finally:
        gc.enable()


# --- a rank that is late, or that others wait for ------------------------------
async def test_no_answer_in_time() -> None:
    """The rank that is late is named; of a call that is awaited alone the time counts from when it was sent."""
    workers, other = Held("actor", 2), Fakes("ref", 1)
    workers.limits = TimeLimits(0.04, {"patient": 60.0})
    both = [workers.submit(rank, "add", "add", 1) for rank in (0, 1)]
    workers.open("add")[1][1].set_result(1)
    with refuses(WorkerLost, "actor worker 0", "host0", "'add'", "0.04 s"):
        await workers.answers(both)
    call = workers.submit(1, "patient", "wait")
    assert call.limit_s == 60.0
    sent_long_ago = replace(call, started=call.started - 60.0)
    workers.sent.append((sent_long_ago, asyncio.get_running_loop().create_future()))
    with refuses(WorkerLost, "actor worker 1", "host0", "'patient'", "0.02 s"):
        await other.answers([call], timeout_s=0.02)
    with refuses(WorkerLost, "actor worker 1", "host0", "'patient'", "60 s"):
        await sent_long_ago.answer()


def wait_in_vain(rank: int) -> str:
    """What gloo says at rank 0, which waits for another one."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["told"])
        return ""
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=200), dist.group.WORLD)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.zeros(1))
    store.set("told", "")
    return str(caught.value)


async def test_the_rank_that_others_wait_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those whose collective operation fails for it; nor one that works, where another fails by itself."""
    monkeypatch.setattr(module_of_groups, "COLLECTIVE_GRACE_S", 0.02)
    said, _ = run_ranks(2, wait_in_vain)
    workers = Held("actor", 3)
    for text, kind, named in ((said, WorkerLost, 1), ("KeyError: 'key'", WorkerError, 0)):
        calls = [workers.submit(rank, "update", "update") for rank in range(3)]
        for rank, answer in workers.open("update")[-3:]:
            if rank != 1:
                answer.set_exception(workers.error(rank, "update", text))
        with pytest.raises(WorkerError) as caught:
            await workers.answers(calls)
        error = caught.value
        assert (type(error), error.rank, error.node, error.stage) == (kind, named, "host0", "update")
        assert text in "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_the_rank_that_is_gone_or_stopped_is_named_rather_than_the_one_that_noticed() -> None:
    """NCCL ends the processes of ranks that have waited too long: a dead one is not blamed where another is stopped."""
    group = Fakes("actor", 2)
    noticed, died = (kind(0, "update", "its process died (SIGABRT)") for kind in (group.error, group.lost))
    assert run(group.root_cause(noticed)) is noticed, "all ranks are there: it is this one's own mistake"
    for state, causes in (("stopped", [True, True]), ("dead", [True, False]), ("gone", [True, False])):
        group.states[1] = state
        found = [run(group.root_cause(error)) for error in (noticed, died)]
        assert [each is not error for each, error in zip(found, (noticed, died), strict=True)] == causes
        assert isinstance(found[0], WorkerLost)
        says(found[0], "actor worker 1", "'update'", state)
        says(found[0].__notes__, "actor worker 0", "SIGABRT")


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


# --- requests that share calls, to a worker in this process ------------------------------
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
    group.worker.gate.set()
    found = await answers(*posted)
    data = found[0][1]
    assert found == [(4, data, 0), (0, data, 2), (2, data, 2)], "where their rows begin"
    assert data.rows["x"].tolist() == [2, 2, 1]
    assert group.asked == [("collect", 0, 3)]
    box.post("double", (3,))
    await asyncio.sleep(0)
    assert group.asked[1:] == [("collect", 0, 1)], "it begins again"


async def test_a_process_in_anothers_place_is_posted_to_anew() -> None:
    group, processes, boxes = Group(), [object(), object()], []
    for process in (processes[0], *processes):
        group.handles[0] = process
        assert WorkerGroup.post(group, 0, "generate", "double", 1).process is process
        boxes.append(group._postboxes[0])
    assert [boxes[0] is box for box in boxes] == [True, True, False], "one as long as it lives"


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
    assert (type(refused), good[0], type(mistaken)) == (ConfigError, 2, WorkerError)
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


# --- the loop ------------------------------
async def double(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(f"{number}")
    return 2 * number


def test_values_and_errors_come_back_also_where_a_loop_runs_already() -> None:
    async def cell() -> int:
        return run(double(3))

    assert run(double(4)) == blocking(double)(4) == 8
    assert asyncio.run(cell()) == 6
    with pytest.raises(ValueError, match="-1"):
        run(double(-1))
    with pytest.raises(AssertionError, match="await"):
        run(cell())


def test_an_interrupted_wait_cancels_the_coroutine() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    def interrupt(*args: object) -> None:
        begun.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), patch.object(Future, "result", interrupt):
        run(endless())
    assert ended.wait(60)
