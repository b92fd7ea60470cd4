"""An episode that fails is sampled again alone: seeds, the others of its group, and what that throws away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.agents import Episode, Row
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError
from grpo_dist.trainer.rollout.job import RolloutJob, episode_metrics, group_seed
from grpo_dist.workers.rollout import GroupRequest
from grpo_dist.workers.scorer import Task
from tests.agents.fakes import Characters
from tests.messages import refuses, says
from tests.worker_settings import agent

N, P, GROUPS = 8, 0.05, 300
LOOPS = """
import asyncio
import random

from grpo_dist.agents import AgentLoop


class Lame(AgentLoop):
    '''Episode 2 fails at each attempt, the first time before the others go on.'''

    seen, cancelled = [], 0

    def __init__(self, attempts):
        self.attempts = attempts

    async def run(self, episode):
        try:
            await episode.generate()
            if episode.index == 2:
                Lame.seen.append(episode)
                episode.metrics["left"] = 1.0
                raise OSError(f"attempt {episode.attempt}")
            while len(Lame.seen) < self.attempts:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            Lame.cancelled += 1
            raise


class Fragile(AgentLoop):
    '''Fails on an x, or by chance.'''

    gives_reward = True

    def __init__(self, chance):
        self.chance = chance

    async def run(self, episode):
        turn = await episode.generate()
        name = f"{episode.row.uid}/{episode.index}/{episode.attempt}"
        if turn.text == "x" or random.Random(name).random() < self.chance:
            raise OSError("it broke")
        episode.reward = 1.0


class Picky(AgentLoop):
    gives_reward = True

    def __init__(self): ...

    async def run(self, episode):
        turn = await episode.generate()
        if turn.text == "x":
            episode.reject("an x")
        episode.reward = 1.0
"""


class Engine:
    """Writes x where the seed is one of `bad`, or a random number of it is below `share`; else a."""

    def __init__(self, *bad: int, share: float = 0.0) -> None:
        self.bad, self.share, self.seeds = bad, share, list[int]()

    async def generate(
        self, prompt: list[int], sampling: SamplingSettings, request_id: str | None = None
    ) -> list[Response]:
        assert sampling.seed is not None
        self.seeds.append(sampling.seed)
        is_bad = sampling.seed in self.bad or breaks(sampling.seed, self.share)
        return [Response([ord("x" if is_bad else "a"), 0], [-0.5] * 2, False, [3] * 2)]


def breaks(name: int | str, share: float) -> bool:
    return random.Random(name).random() < share


@asynccontextmanager
async def runner(folder: Path, engine: Engine, name: str, kwargs: dict[str, Any], **limits: Any) -> AsyncIterator[Any]:
    (folder / "loops.py").write_text(LOOPS)
    made = EpisodeRunner(agent(f"{folder}/loops.py:{name}", kwargs, **limits), engine.generate)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def group(n: int = 4, seed: int = 5, uid: str = "step1-prompt9") -> list[Episode]:
    sampling = SamplingSettings(n, 1.0, 1.0, -1, 30, seed)
    row = Row(uid, [1, 2])
    return [Episode(row, sampling, index=i, tokenizer=Characters(), max_model_len=90) for i in range(n)]


# of blake2b("7/attempt/1") and of 2, 8 bytes, the first 30 bits
SEEDS_OF_EPISODE_2 = [7, 187303685, 415678196]


async def test_a_failed_episode_alone_is_sampled_again_with_its_own_next_seed(tmp_path: Path) -> None:
    """Three attempts, each an episode of its own, whatever the others do meanwhile; they are never cancelled."""
    engine, failed = Engine(), list[AgentError]()
    async with runner(tmp_path, engine, "Lame", {"attempts": 3}) as made:
        ended = await made.run(group(), 3, failed)
        lame = type(made._loop)
    assert [episode.index for episode in ended] == [0, 1, 3]
    assert lame.cancelled == 0
    assert sorted(engine.seeds) == sorted([5, 6, 8, *SEEDS_OF_EPISODE_2])
    assert [episode.attempt for episode in lame.seen] == [0, 1, 2]
    assert len({id(episode) for episode in lame.seen}) == 3
    assert [episode.attempt for episode in lame.seen] == [0, 1, 2]
    assert [episode.metrics for episode in lame.seen] == [{"left": 1.0}] * 3, "nothing stays of an attempt"
    assert [(error.kind, error.was_last) for error in failed] == [("error", last) for last in (False, False, True)]
    says(str(failed[2]), "attempt 2", "attempt 0", "step1-prompt9", "episode 2")


@pytest.mark.parametrize("least", [None, 4, 5])
async def test_a_group_that_can_do_without_none_ends_with_the_last_attempt(tmp_path: Path, least: int | None) -> None:
    failed: list[AgentError] = []
    async with runner(tmp_path, Engine(), "Lame", {"attempts": 9}) as made:
        with refuses(AgentError, "attempt 2", "attempt 0") as caught:
            await made.run(group(), least, failed)
        assert type(made._loop).cancelled == 3, "nobody needs them any more"
    assert caught.value.was_last  # type: ignore[attr-defined]
    assert [error.was_last for error in failed] == [False, False], "but for the one that was raised"


@pytest.mark.parametrize("most", [1, 2])
async def test_so_many_attempts_there_are(tmp_path: Path, most: int) -> None:
    engine, failed = Engine(), list[AgentError]()
    async with runner(tmp_path, engine, "Lame", {"attempts": most}, max_attempts=most) as made:
        assert len(await made.run(group(), 3, failed)) == 3
    assert [error.was_last for error in failed] == [*[False] * (most - 1), True]
    assert sorted(engine.seeds) == sorted([5, 6, 8, *SEEDS_OF_EPISODE_2[:most]])


async def test_a_response_that_is_refused_is_sampled_with_the_next_seed(tmp_path: Path) -> None:
    """By its first seed episode 2 writes an x, by the next one an a."""
    failed: list[AgentError] = []
    async with runner(tmp_path, Engine(7), "Picky", {}) as made:
        ended = await made.run(group(), None, failed)
    assert [episode.text for episode in ended] == ["a"] * 4
    assert [episode.attempt for episode in ended] == [0, 0, 1, 0]
    assert [error.kind for error in failed] == ["rejected"]
    says(str(failed[0]), "episode.reject", "an x")


def thrown_away_before(*, by_sample: bool) -> float:
    """The share of attempts that did not train when a second failure, by the same seed, cost the group."""
    begun = trained = 0
    for i in range(GROUPS):
        seed = group_seed(1, 1, i)
        names: list[tuple[Any, Any]] = [
            (seed + k, seed + k) if by_sample else (f"prompt{i}/{k}/0", f"prompt{i}/{k}/1") for k in range(N)
        ]
        again = [second for first, second in names if breaks(first, P)]
        begun += N + len(again)
        trained += 0 if any(breaks(second, P) for second in again) else N
    return 1 - trained / begun


@pytest.mark.parametrize(
    ("by_sample", "before", "now"), [(True, 0.36, 0.05), (False, 0.07, 0.05)], ids=["by what is sampled", "by chance"]
)
async def test_with_one_attempt_in_twenty_failing_one_in_twenty_is_thrown_away(
    tmp_path: Path, by_sample: bool, before: float, now: float
) -> None:
    """The figures of docs/environments.md, which are those of infinitely many groups; of 300 they are up to 0.03 apart.

    Before: of the groups 1 - 0.95^8 are lost by samples that come again, 1 - (1 - 0.05^2)^8 by chance. Now 0.05 of the
    attempts, and 1 - (1 - 0.05^3)^8 of the groups.
    """
    sampling = SamplingSettings(N, 1.0, 1.0, -1, 30, 0)
    job = RolloutJob([GroupRequest(f"prompt{i}", np.array([1]), sampling, Task("", "", {})) for i in range(GROUPS)])
    engine = Engine(share=P if by_sample else 0.0)

    async with runner(tmp_path, engine, "Fragile", {"chance": 0.0 if by_sample else P}) as made:

        async def play(i: int) -> None:
            try:
                ended = await made.run(group(N, group_seed(1, 1, i), f"prompt{i}"), None, job.failed_attempts[i])
                assert len(ended) == N
            except AgentError as error:
                job.failed[i] = error
                job.failed_attempts[i].append(error)

        await asyncio.gather(*(play(i) for i in range(GROUPS)))
    metrics = episode_metrics([job])
    assert thrown_away_before(by_sample=by_sample) == pytest.approx(before, abs=0.03)
    assert metrics["agent/wasted_episodes"] == pytest.approx(now, abs=0.01)
    assert metrics["agent/wasted_episodes"] <= 0.06
    assert metrics.get("agent/dropped_groups", 0) <= 2, "0.05 to the third, of 2400 episodes: 0.3"
