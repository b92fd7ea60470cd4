"""An episode that fails is sampled again alone: seeds, the others of its group, and what that throws away."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError
from grpo_dist.trainer.rollout.job import RolloutJob, episode_metrics, group_seed
from grpo_dist.workers.rollout import GroupRequest
from grpo_dist.workers.scorer import Task
from tests.agents.loops import episodes, runner
from tests.messages import refuses, says


class Engine:
    """Writes x where the seed is one of `bad`, or a random number of it is below `share`; else a."""

    def __init__(self, *bad: int, share: float = 0.0) -> None:
        self.bad, self.share, self.seeds = bad, share, list[int]()

    async def generate(
        self, prompt: list[int], sampling: SamplingSettings, request_id: str | None = None
    ) -> list[Response]:
        assert sampling.seed is not None
        self.seeds.append(sampling.seed)
        is_bad = sampling.seed in self.bad or random.Random(sampling.seed).random() < self.share
        return [Response([ord("x" if is_bad else "a"), 0], [-0.5] * 2, False, [3] * 2)]


# of blake2b("7/attempt/1") and of 2, 8 bytes, the first 30 bits
SEEDS_OF_EPISODE_2 = [7, 187303685, 415678196]


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_a_failed_episode_alone_is_sampled_again_with_its_own_next_seed(tmp_path: Path, most: int) -> None:
    """Each attempt is an episode of its own, whatever the others do meanwhile; they are never cancelled."""
    engine, failed = Engine(), list[AgentError]()
    kwargs = {"attempts": most}
    async with runner(tmp_path, engine.generate, name="Lame", kwargs=kwargs, max_attempts=most) as made:
        ended = await made.run(episodes(), 3, failed)
        lame = type(made._loop)
    assert [episode.index for episode in ended] == [0, 1, 3]
    assert lame.cancelled == 0
    assert sorted(engine.seeds) == sorted([5, 6, 8, *SEEDS_OF_EPISODE_2[:most]])
    assert len({id(episode) for episode in lame.seen}) == most
    assert [episode.attempt for episode in lame.seen] == list(range(most))
    assert [episode.metrics for episode in lame.seen] == [{"left": 1.0}] * most, "nothing stays of an attempt"
    assert [(error.kind, error.was_last) for error in failed] == [("error", i == most - 1) for i in range(most)]
    says(str(failed[-1]), f"attempt {most - 1}", "attempt 0", "step1-prompt9", "episode 2")


@pytest.mark.parametrize("least", [None, 4, 5])
async def test_a_group_that_can_do_without_none_ends_with_the_last_attempt(tmp_path: Path, least: int | None) -> None:
    failed: list[AgentError] = []
    async with runner(tmp_path, Engine().generate, name="Lame", kwargs={"attempts": 9}) as made:
        with refuses(AgentError, "attempt 2", "attempt 0") as caught:
            await made.run(episodes(), least, failed)
        assert type(made._loop).cancelled == 3, "nobody needs them any more"
    assert caught.value.was_last
    assert [error.was_last for error in failed] == [False, False], "but for the one that was raised"


async def test_a_response_that_is_refused_is_sampled_with_the_next_seed(tmp_path: Path) -> None:
    """By its first seed episode 2 writes an x, by the next one an a."""
    failed: list[AgentError] = []
    async with runner(tmp_path, Engine(7).generate, name="Filter", kwargs={"how": "reject"}) as made:
        ended = await made.run(episodes(), None, failed)
    assert [(episode.text, episode.attempt) for episode in ended] == [("a", 0), ("a", 0), ("a", 1), ("a", 0)]
    assert [error.kind for error in failed] == ["rejected"]
    says(str(failed[0]), "episode.reject", "an x")


async def test_with_one_sample_in_twenty_failing_one_attempt_in_twenty_is_thrown_away(tmp_path: Path) -> None:
    """On paper 0.05 of the attempts, and of the groups 1 - (1 - 0.05^3)^8.

    Were they sampled again with the same seeds, it would be 1 - 0.95^8 = 0.34 of the groups.
    """
    n, groups = 8, 300
    sampling = SamplingSettings(n, 1.0, 1.0, -1, 30, 0)
    job = RolloutJob([GroupRequest(f"prompt{i}", np.array([1]), sampling, Task("", "", {})) for i in range(groups)])
    engine = Engine(share=0.05)

    async with runner(tmp_path, engine.generate, name="Filter", kwargs={"how": "raise"}) as made:

        async def play(i: int) -> None:
            try:
                ended = await made.run(episodes(n, group_seed(1, 1, i), f"prompt{i}"), None, job.failed_attempts[i])
                assert len(ended) == n
            except AgentError as error:
                job.failed[i] = error
                job.failed_attempts[i].append(error)

        await asyncio.gather(*(play(i) for i in range(groups)))
    metrics = episode_metrics([job])
    assert metrics["agent/wasted_episodes"] == pytest.approx(0.05, abs=0.01)
    assert metrics.get("agent/dropped_groups", 0) <= 2, "0.05 to the third, of 2400 episodes: 0.3"
