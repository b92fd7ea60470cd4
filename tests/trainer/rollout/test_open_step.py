"""`trainer.stream_mini_batches` on a pump whose groups come when a test says so: which train together, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_dist.data.sampler import PromptSampler
from grpo_dist.errors import DataLost, WeightsLost
from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.rollout.job import RolloutJob
from grpo_dist.trainer.rollout.sampling import TrainingSampler
from tests.trainer.instant_pump import MIXED, InstantPump, make_sampler

SIZES = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.stream_mini_batches=true",
)


class HeldPump(InstantPump):
    """A group, or its failure, comes once `come` has been set for its uid; with `lost` that raises, once."""

    def __init__(self, scores: dict[int, list[float]]) -> None:
        super().__init__(scores)
        self.come: dict[str, asyncio.Event] = {}
        self.lost: list[Exception] = []

    def submit(self, *args: Any, **options: Any) -> RolloutJob:
        job = super().submit(*args, **options)
        scores, failed, job.scores, job.failed = job.scores, job.failed, {}, {}
        self.come |= {request.uid: asyncio.Event() for request in job.requests}

        async def flow(i: int) -> None:
            await self.come[job.requests[i].uid].wait()
            if self.lost:
                raise self.lost.pop()
            for held, come in ((scores, job.scores), (failed, job.failed)):
                if i in held:
                    come[i] = held[i]  # type: ignore[index]

        job.flows = {i: asyncio.create_task(flow(i)) for i in range(len(job.requests))}
        return job


def held_sampler(*overrides: str, failing: tuple[Any, ...] = ()) -> tuple[TrainingSampler, HeldPump]:
    """A sampler of 8 prompts, 4 a step, in mini-batches of 2."""
    scores = dict.fromkeys(range(8), MIXED)
    sampler, pump = make_sampler(scores, *SIZES, *overrides), HeldPump(scores)
    sampler.order = PromptSampler(8, 4, shuffle=False, seed=0)  # type: ignore[assignment]
    sampler.pump, pump.failing = pump, dict.fromkeys(failing, "agent")  # type: ignore[assignment]
    return sampler, pump


async def settle(pump: HeldPump, *uids: str) -> None:
    """Let groups come, and all that follows from them happen."""
    for uid in uids:
        pump.come[uid].set()
    for _ in range(20):
        await asyncio.sleep(0)


def uids(batch: Any) -> list[str]:
    """The groups of a batch, in order."""
    return list(dict.fromkeys(batch["uid"].tolist()))


def prompt(i: int) -> str:
    return f"step1-prompt{i}"


@pytest.mark.parametrize("order", [(3, 1, 0, 2), (0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_mini_batches_are_those_of_the_prompts_whoever_comes_first(order: tuple[int, ...]) -> None:
    """Each trains as soon as its two groups, and those before them, are there."""

    async def scenario() -> None:
        sampler, pump = held_sampler()
        sampler.open_steps(1, 1)
        parts = [asyncio.create_task(sampler.mini_batch(1, number)) for number in (0, 1)]
        for count in range(1, 5):
            await settle(pump, prompt(order[count - 1]))
            come = set(order[:count])
            assert [part.done() for part in parts] == [come >= {0, 1}, come >= {0, 1, 2, 3}]
        assert [uids(await part) for part in parts] == [[prompt(0), prompt(1)], [prompt(2), prompt(3)]]
        assert uids((await sampler.rollout(1)).batch) == [prompt(i) for i in range(4)]

    run(scenario())


def test_behind_a_failed_group_the_others_move_up_and_another_prompt_ends_the_batch() -> None:
    async def scenario() -> None:
        sampler, pump = held_sampler(failing=(1,))
        sampler.open_steps(1, 1)
        parts = [asyncio.create_task(sampler.mini_batch(1, number)) for number in (0, 1)]
        await settle(pump, prompt(0), prompt(2))
        assert not parts[0].done(), "the second might still come"
        await settle(pump, prompt(1))
        assert uids(await parts[0]) == [prompt(0), prompt(2)]
        await settle(pump, prompt(3))
        assert not parts[1].done()
        await settle(pump, f"{prompt(4)}-try2")
        assert uids(await parts[1]) == [prompt(3), f"{prompt(4)}-try2"]

    run(scenario())


def test_a_group_waits_for_its_greedy_response_and_falls_out_with_it() -> None:
    async def scenario() -> None:
        sampler, pump = held_sampler("algorithm.adv_estimator=remax", failing=(("greedy", 0),))
        sampler.open_steps(1, 1)
        part = asyncio.create_task(sampler.mini_batch(1, 0))
        await settle(pump, prompt(0), f"{prompt(0)}-greedy", prompt(1), prompt(2), f"{prompt(2)}-greedy")
        assert not part.done()
        await settle(pump, f"{prompt(1)}-greedy")
        assert uids(await part) == [prompt(1), prompt(2)]
        assert (await part)["reward_baseline"].tolist() == [9.0] * len(MIXED) * 2

    run(scenario())


def test_what_trains_is_not_sampled_again_after_a_machine_was_lost() -> None:
    """Before anything trains, all groups come again by the same seeds; after that only a checkpoint helps."""

    async def scenario() -> None:
        sampler, pump = held_sampler()
        sampler.open_steps(1, 1)
        pump.lost = [DataLost("a group is gone")]
        await settle(pump, *(prompt(i) for i in range(4)))
        first, again = pump.requests[:4], pump.requests[4:]
        assert [(one.uid, one.sampling) for one in again] == [(one.uid, one.sampling) for one in first]
        await settle(pump, prompt(0), prompt(1))
        assert uids(await sampler.mini_batch(1, 0)) == [prompt(0), prompt(1)]
        pump.lost = [DataLost("another one is gone")]
        await settle(pump, prompt(2))
        with pytest.raises(DataLost, match="another one"):
            await sampler.mini_batch(1, 1)
        assert len(pump.requests) == 8

    run(scenario())


def test_without_engines_that_hold_the_weights_nothing_is_sampled_again() -> None:
    async def scenario() -> None:
        sampler, pump = held_sampler()
        sampler.open_steps(1, 1)
        pump.lost = [WeightsLost("no engine is left")]
        await settle(pump, prompt(3))
        with pytest.raises(WeightsLost):
            await sampler.mini_batch(1, 0)
        assert len(pump.requests) == 4

    run(scenario())
