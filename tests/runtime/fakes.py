"""Nodes and processes that are none, and a store in this process: for tests without Ray."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from grpo_dist.runtime import nodes
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import TimeLimits
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import Nodes
from grpo_dist.runtime.process import Address
from grpo_dist.runtime.resources import Bundle


class FakeNodes(Nodes):
    """Nodes that are lost, and bundles without room, when a test says so."""

    def __init__(self, wait_minutes: float = 0.0) -> None:
        self.told: list[str] = []
        super().__init__(wait_minutes, self.told.append)
        self.lost: dict[str, str] = {}  # by node id, "HOST (ADDRESS)"
        self.full: set[Any] = set()  # bundles for which there is no room
        self.left: list[Any] = []  # bundles whose room was left to others

    async def dead(self) -> dict[str, str]:
        return self.lost

    async def has_room(self, bundle: Any) -> bool:
        return bundle not in self.full

    async def leave_room(self, bundle: Any) -> None:
        self.left.append(bundle)

    async def _situation(self) -> str:
        return f"lost: {', '.join(self.lost.values())}"


class Fakes(WorkerGroup):
    """Processes that are none, two on each node. What is asked of them has been answered by then.

    `results` are by method and rank what is answered, or raised; None where nothing is given, and by new processes.
    """

    def __init__(self, role: str, size: int, **results: Any) -> None:
        bundles = [Bundle(1.0, 0.0, rank, 0) for rank in range(size)]
        super().__init__(role, [f"{rank}-0" for rank in range(size)], TimeLimits(60.0), bundles=bundles)
        hosts = [rank // 2 for rank in range(size)]
        self.note_addresses([Address(f"host{i}", f"10.0.0.{i}", 7, f"node{i}") for i in hosts])
        self.results, self.lives = results, [0] * size  # how often each was started again
        self.asked: list[tuple[Any, ...]] = []  # (method, rank, arguments ...); of new processes ("respawn", rank)
        self.states: dict[int, str] = {}  # by rank, if they are not running

    @property
    def order(self) -> list[tuple[str, int]]:
        return [(method, rank) for method, rank, *_ in self.asked]

    def submit(self, rank: int, stage: str, method: str, *args: Any, **_: Any) -> Call:
        self.tell(rank, method, *args)
        return Call(method, self, rank, stage, time.monotonic(), self.limits.of(stage), self.handles[rank], "data")

    post = submit_for_data = submit

    def tell(self, rank: int, method: str, *args: Any) -> None:
        self.asked.append((method, rank, *args))

    async def value(self, call: Call) -> Any:
        result = self.results.get(str(call.ref), {}).get(call.rank)
        if isinstance(result, Exception):
            raise result
        return result

    async def call_home(self) -> list[Address]:
        return [self.addresses[rank] for rank in self.present]

    def retire(self, rank: int) -> None:
        self.handles[rank] = None

    def respawn(self, rank: int) -> None:
        self.lives[rank] += 1
        self.handles[rank] = f"{rank}-{self.lives[rank]}"
        self.tell(rank, "respawn")
        for answers in self.results.values():
            answers.pop(rank, None)

    async def _states(self, ranks: Sequence[int]) -> dict[int, str]:
        return {rank: self.states.get(rank, "running") for rank in ranks}


class Held(Fakes):
    """Processes that answer when they are told to, or are lost."""

    def __init__(self, role: str, size: int) -> None:
        super().__init__(role, size)
        self.sent: list[tuple[Call, asyncio.Future[Any]]] = []

    def submit(self, rank: int, stage: str, method: str, *args: Any, **_: Any) -> Call:
        call = super().submit(rank, stage, method, *args)
        self.sent.append((call, asyncio.get_running_loop().create_future()))
        return call

    post = submit_for_data = submit

    async def value(self, call: Call) -> Any:
        return await next(answer for each, answer in self.sent if each is call)

    def retire(self, rank: int) -> None:
        for call, answer in self.sent:
            if call.rank == rank and call.is_current and not answer.done():
                answer.set_exception(self.lost(rank, call.stage, "its process was replaced"))
        super().retire(rank)

    def open(self, method: str) -> list[tuple[int, asyncio.Future[Any]]]:
        return [(call.rank, answer) for call, answer in self.sent if call.ref == method and not answer.done()]


async def settle() -> None:
    """Let all go on that can."""
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Stored:
    value: Any


@pytest.fixture
def store_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", Stored)
    monkeypatch.setattr(ray, "get", lambda refs: [ref.value for ref in refs] if isinstance(refs, list) else refs.value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for room come one after the other."""
    for name in ("POLL_S", "PATIENT_POLL_S"):
        monkeypatch.setattr(nodes, name, 0.0)
