"""Agent loops that do one thing each, and a runner of one of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from grpo_dist.agents import Episode, Row
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.engines.settings import SamplingSettings
from tests.agents.fakes import Characters
from tests.worker_settings import agent

LOOPS = """
import asyncio
import time

from grpo_dist.agents import AgentLoop

class Tool(AgentLoop):
    cleaned = running = most = 0
    closed = None  # how many episodes had ended by then

    def __init__(self, mode="answer", api_key=None):
        if mode == "broken":
            raise OSError("no such service")
        if mode == "leaving":
            exit("no licence")
        self.mode = mode

    async def run(self, episode):
        try:
            while (await episode.generate(stop="=")).stop == "=":
                await getattr(self, self.mode)(episode)
        finally:
            Tool.cleaned += 1

    async def answer(self, episode):
        print("episode", episode.index)
        await asyncio.sleep(0.02 * (4 - episode.index))
        episode.append(str(episode.index))

    async def fail(self, episode):
        if episode.index == 2:
            raise KeyError("calculator")
        await self.hang(episode)

    async def hang(self, episode):
        await asyncio.sleep(1000)

    async def block(self, episode):
        time.sleep(30)
        raise RuntimeError("at last")

    async def own_timeout(self, episode):
        await asyncio.wait_for(self.hang(episode), 0.01)

    async def own_cancel(self, episode):
        task = asyncio.create_task(self.hang(episode))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    async def give_up(self, episode):
        episode.fail("no free port")

    async def no_reward(self, episode):
        episode.reward = float("nan")

    async def close(self):
        Tool.closed = Tool.cleaned

    async def no_metrics(self, episode):
        episode.metrics = None

    async def forever(self, episode):
        while True:
            await episode.generate()

    async def count(self, episode):
        Tool.running += 1
        Tool.most = max(Tool.most, Tool.running)
        await asyncio.sleep(0.01)
        Tool.running -= 1

    async def no_text(self, episode):
        episode.append(3)  # its line is told, and not ours

    async def leave(self, episode):
        raise SystemExit(3)

    async def task_leaves(self, episode):
        await asyncio.create_task(self.leave(episode))

class Stoic(AgentLoop):
    gives_reward = True

    def __init__(self, **options): ...

    async def run(self, episode):
        try:
            await episode.generate()
        except Exception:
            episode.reward = 0.0

class Visitor(Stoic):
    async def run(self, episode):
        async with episode.endpoint():
            pass

class Judge(Tool):
    gives_reward = True

    async def cut_short(self, episode):
        if self.mode == "forever":
            episode.reward = -1.0

class Filter(Stoic):
    async def run(self, episode):
        if (await episode.generate()).text == "x":
            episode.reject("an x")
        episode.reward = 1.0

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
"""


@asynccontextmanager
async def runner(
    folder: Path,
    generate: object,
    mode: str = "",
    name: str = "Tool",
    gateway: Any = None,
    kwargs: dict[str, Any] | None = None,
    **limits: Any,
) -> AsyncIterator[EpisodeRunner]:
    (folder / "tool.py").write_text(LOOPS)
    kwargs = {"mode": mode, "api_key": "SECRET123"} if kwargs is None else kwargs
    settings = agent(f"{folder}/tool.py:{name}", kwargs, **({"timeout_s": 30.0} | limits))
    made = EpisodeRunner(settings, generate, gateway)  # type: ignore[arg-type]
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def episodes(count: int = 4, seed: int = 5, uid: str = "step1-prompt9", **limits: Any) -> list[Episode]:
    sampling = SamplingSettings(count, 1.0, 1.0, -1, 30, seed)
    row = Row(uid, [1, 2])
    return [Episode(row, sampling, index=i, tokenizer=Characters(), max_model_len=90, **limits) for i in range(count)]
