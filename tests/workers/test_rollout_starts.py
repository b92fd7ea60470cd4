"""Engines that start again or later, and sleep while the actor is updated: on processes that are none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_dist.engines.base import Footprint
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.errors import EngineError, WeightSyncError
from grpo_dist.runtime import nodes
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.resources import Bundle
from grpo_dist.workers.rollout import RolloutGroup
from grpo_dist.workers.weight_transport import Outcomes
from tests.runtime.fake_nodes import FakeNodes
from tests.worker_settings import changed, engine_settings
from tests.workers.test_weight_transport import Scripted


class Engines(Scripted):
    """Engines that are none, and that can be replaced."""

    async def call_home(self) -> list:
        return []

    def retire(self, rank: int) -> None:
        self.handles[rank] = None

    def respawn(self, rank: int) -> None:
        self.handles[rank] = object()
        self.asked.append(("respawn", rank))
        self.results.get("sleep", {}).pop(rank, None)  # the new process sleeps as it should


def engines_of(*settings: EngineSettings, **results: Any) -> tuple[RolloutGroup, Engines]:
    workers = Engines("rollout", len(settings), **results)
    workers.bundles = [Bundle(1.0, 0.0, rank, 0) for rank in range(len(settings))]
    group = RolloutGroup(workers, RestartBudget(1, FakeNodes()))
    run(group.start(settings))
    workers.asked.clear()
    workers.told.clear()
    return group, workers


def test_an_engine_that_is_replaced_takes_what_the_one_before_took() -> None:
    """And does not let vLLM measure what is free while other roles are at work. Without GPUs nothing is noted."""
    died = EngineError("vLLM failed")
    plain = engine_settings(kv_cache_memory_gib=None, free_cache_engine=True, shares_gpu=True)
    group, workers = engines_of(plain, plain, sleep={1: died})
    group.note_started([None, Footprint(total_gib=27.5, kv_cache_gib=20.25)])
    run(group.begin_update())
    (start,) = [told for told in workers.told if told[0] == "start"]
    assert start == ("start", 1, changed(plain, footprint_gib=27.5, kv_cache_memory_gib=20.25))
    assert group.restarts.failures == ["vLLM failed"]
    assert workers.asked == [("sleep", 0), ("sleep", 1), ("respawn", 1), ("start", 1), ("sleep", 1)], (
        "it starts and sleeps before the update has the memory"
    )
    workers.asked.clear()
    workers.results = {"sleep": {0: died}}
    with pytest.raises(EngineError) as caught:
        run(group.begin_update())
    assert caught.value is died
    assert workers.asked == [("sleep", 0), ("sleep", 1)], "the budget is spent"


def test_an_engine_that_is_starting_when_others_sleep_starts_first() -> None:
    settings = engine_settings(free_cache_engine=True, shares_gpu=True)
    group, workers = engines_of(settings, settings)

    async def replace_and_sleep() -> None:
        group.replace(1, workers.handles[1], EngineError("it died while it sampled"))
        await group.begin_update()

    run(replace_and_sleep())
    assert workers.asked == [("respawn", 1), ("start", 1), ("sleep", 0), ("sleep", 1)]
    assert not group.is_starting(1)


def test_an_engine_whose_machine_comes_later_gets_the_weights_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its start nor the syncs and updates until then wait for it."""
    monkeypatch.setattr(nodes, "POLL_S", 0.0)
    settings = engine_settings(free_cache_engine=True, shares_gpu=True)
    workers, there, brought = Engines("rollout", 2), FakeNodes(), list[list[int]]()
    workers.bundles = [Bundle(1.0, 0.0, rank, 0) for rank in range(2)]
    workers.handles[1], there.full = None, {workers.bundles[1]}
    group = RolloutGroup(workers, RestartBudget(1, there))

    async def bring(ranks: Sequence[int]) -> Outcomes:
        brought.append(list(ranks))
        return dict.fromkeys(ranks, 5)

    async def start_and_sync() -> None:
        assert await group.start([settings, settings]) == [None, None]
        await group.take_weights(bring, 5)
        await group.begin_update()
        await group.take_weights(bring, 5)
        assert ([member.is_ready for member in group.members], brought) == ([True, False], [[0], [0]])
        assert workers.asked == [("start", 0), ("wake", 0), ("sleep", 0), ("wake", 0)]
        there.full.clear()
        while not group.members[1].is_ready:
            await asyncio.sleep(0)

    run(start_and_sync())
    assert workers.asked[4:] == [("respawn", 1), ("start", 1), ("wake", 1)]
    assert brought == [[0], [0], [1]]


def extra(there: FakeNodes, ranks: Sequence[int]) -> tuple[RolloutGroup, Engines]:
    """Engines of which these are not required, and have no process yet."""
    workers = Engines("rollout", 3)
    workers.bundles = [Bundle(1.0, 0.0, rank, 0, required=rank not in ranks) for rank in range(3)]
    for rank in ranks:
        workers.handles[rank] = None
    return RolloutGroup(workers, RestartBudget(0, there)), workers


def test_an_engine_that_has_room_before_the_first_sync_gets_weights_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PATIENT_POLL_S", 0.0)
    settings, brought = engine_settings(), list[list[int]]()
    group, _ = extra(FakeNodes(), [2])

    async def bring(ranks: Sequence[int]) -> Outcomes:
        brought.append(list(ranks))
        return dict.fromkeys(ranks, 7)

    async def start_and_sync() -> None:
        await group.start([settings] * 3)
        while group.is_starting(2):
            await asyncio.sleep(0)
        assert not group.members[2].is_ready, "it has the weights of the model's folder"
        await group.take_weights(bring, 7)
        while not group.members[2].is_ready:
            await asyncio.sleep(0)
        await group.take_weights(bring, 7)

    run(start_and_sync())
    assert brought == [[0, 1], [2], [0, 1, 2]]


def test_an_engine_that_starts_during_the_first_sync_gets_the_weights_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A required one that was replaced, too."""
    group, workers = engines_of(engine_settings(), engine_settings())
    brought = list[list[int]]()

    async def bring(ranks: Sequence[int]) -> Outcomes:
        brought.append(list(ranks))
        return dict.fromkeys(ranks, 3)

    async def replace_and_sync() -> None:
        group.replace(1, workers.handles[1], EngineError("it died before the first sync"))
        await group.take_weights(bring, 3)
        while not group.members[1].is_ready:
            await asyncio.sleep(0)

    run(replace_and_sync())
    assert brought == [[0], [1]]


def test_an_engine_that_no_weights_reach_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not asked to form a group with it."""
    monkeypatch.setattr(nodes, "PATIENT_POLL_S", 0.0)
    there, settings, brought = FakeNodes(), engine_settings(), list[list[int]]()
    group, workers = extra(there, [1, 2])

    async def bring(ranks: Sequence[int]) -> Outcomes:
        brought.append(list(ranks))
        return {rank: WeightSyncError("the weight group was not formed") if rank == 2 else 4 for rank in ranks}

    async def start_and_sync() -> None:
        await group.start([settings] * 3)
        await group.take_weights(bring, 4)
        while not (group.members[1].is_ready and there.left):
            await asyncio.sleep(0)
        await group.take_weights(bring, 4)

    run(start_and_sync())
    assert sorted(brought[:3]) == [[0], [1], [2]]
    assert brought[3:] == [[0, 1]]
    assert (there.left, group.restarts.failures, workers.present) == ([workers.bundles[2]], [], [0, 1])


def test_engines_sleep_if_they_are_to() -> None:
    awake = engine_settings()
    group, workers = engines_of(awake, changed(awake, free_cache_engine=True, shares_gpu=True), awake)
    run(group.begin_update())
    assert workers.asked == [("sleep", 1)]
