"""Episodes side by side on a thread of their own: order, limits, failures, abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from grpo_dist.agents import Episode, Row
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import AgentSettings, SamplingSettings
from grpo_dist.errors import AgentError, ConfigError, EngineError
from grpo_dist.rewards.output_lines import OutputLines, printing_to
from tests.agents.fakes import Characters, Writer
from tests.messages import refuses

LOOPS = """
import asyncio
import time

from grpo_dist.agents import AgentLoop


class Tool(AgentLoop):
    cleaned = 0

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
        await asyncio.sleep(1000)

    async def hang(self, episode):
        await asyncio.sleep(1000)

    async def block(self, episode):
        time.sleep(30)
        raise RuntimeError("at last")

    async def own_timeout(self, episode):
        await asyncio.wait_for(asyncio.sleep(1000), 0.01)

    async def own_cancel(self, episode):
        task = asyncio.create_task(asyncio.sleep(1000))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    async def no_text(self, episode):
        episode.append(3)  # its line is told, and not ours

    async def leave(self, episode):
        raise SystemExit(3)

    async def task_leaves(self, episode):
        await asyncio.create_task(self.leave(episode))
"""


def line_of(text: str) -> int:
    """The number of the line of LOOPS with this text."""
    return 1 + next(number for number, line in enumerate(LOOPS.splitlines()) if text in line)


@asynccontextmanager
async def runner(folder: Path, generate: object, mode: str, timeout_s: float = 30.0) -> AsyncIterator[EpisodeRunner]:
    (folder / "tool.py").write_text(LOOPS)
    settings = AgentSettings(f"{folder}/tool.py:Tool", {"mode": mode, "api_key": "SECRET123"}, timeout_s)
    made = EpisodeRunner(settings, generate)  # type: ignore[arg-type]
    try:
        await made.start()
        yield made
    finally:
        made.stop()


def episodes(count: int = 4) -> list[Episode]:
    sampling = SamplingSettings(count, 1.0, 1.0, -1, 30, 5)
    row = Row("step1-prompt9", [1, 2])
    return [Episode(row, sampling, index=i, tokenizer=Characters(), max_model_len=90) for i in range(count)]


def in_loop(test: Callable[[], Awaitable[object]]) -> object:
    return asyncio.run(test())  # type: ignore[arg-type]


def test_responses_come_in_order_whoever_is_done_first(tmp_path: Path) -> None:
    async def test() -> list[Response]:
        writer = Writer(*["1+1=" for _ in range(4)])
        async with runner(tmp_path, writer.generate, "answer") as made:
            with printing_to(lines):
                return await made.run(episodes())

    lines = OutputLines()
    responses = in_loop(test)
    assert lines.take() == ([f"episode {i}" for i in range(4)], 0), "what the loop prints on its thread"
    assert [bytes(r.token_ids) for r in responses] == [f"1+1={i}\0".encode() for i in range(4)]  # type: ignore
    assert [r.mask for r in responses] == [[1, 1, 1, 1, 0, 1]] * 4  # type: ignore[attr-defined]


def test_sampling_runs_where_run_was_called_and_costs_no_time_of_the_loop(tmp_path: Path) -> None:
    async def test() -> list[Response]:
        here, writer = asyncio.get_running_loop(), Writer("a")

        async def slow(*args: object) -> list[Response]:
            assert asyncio.get_running_loop() is here
            await asyncio.sleep(4)
            return await writer.generate(*args)  # type: ignore[arg-type]

        async with runner(tmp_path, slow, "answer", timeout_s=3.0) as made:
            return await made.run(episodes(1))

    assert len(in_loop(test)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "timeout_s", "parts"),
    [
        (
            "fail",
            30,
            ["tool.py:Tool: run()", "KeyError: 'calculator'", "tool.py:", "step1-prompt9"],
        ),
        ("fail", 30, ["episode 2", "turn 1"]),
        ("hang", 3, ["Tool: run()", "agent.timeout_s=3", "step1-prompt9"]),
        ("block", 3, ["Tool: run()", "thread", "timeout_s=3", "tool.py:", "await"]),
        ("own_timeout", 30, ["run()", "TimeoutError"]),
        (
            "own_cancel",
            30,
            ["run()", "CancelledError", "tool.py:", "catch"],
        ),
        ("no_text", 30, ["TypeError: episode.append", "3 (int)", f"tool.py:{line_of('its line is told')}"]),
        ("leave", 30, ["run()", "SystemExit: 3", "tool.py:", "step1-prompt9", "episode"]),
        ("task_leaves", 30, ["run()", "SystemExit: 3", "tool.py:", "step1-prompt9", "episode"]),
    ],
)
def test_failures_are_named_and_end_the_group(tmp_path: Path, mode: str, timeout_s: float, parts: list[str]) -> None:
    async def test() -> None:
        async with runner(tmp_path, Writer(*["1+1="] * 4).generate, mode, timeout_s) as made:
            await made.run(episodes())

    began = time.perf_counter()
    with refuses(AgentError, *parts):
        in_loop(test)
    assert time.perf_counter() - began < 25, "the others are not waited for"


def test_an_error_of_the_engine_stays_what_it_is(tmp_path: Path) -> None:
    async def dead(*args: object) -> list[Response]:
        raise EngineError("vLLM failed")

    async def test() -> None:
        async with runner(tmp_path, dead, "answer") as made:
            await made.run(episodes())

    with refuses(EngineError, "vLLM failed"):
        in_loop(test)


def test_abort_ends_episodes_in_the_tool_and_in_the_engine(tmp_path: Path) -> None:
    async def cancel_while_the_tool_works() -> int:
        async with runner(tmp_path, Writer(*["1+1="] * 4).generate, "hang") as made:
            group, tool = episodes(), type(made._loop)
            task = asyncio.create_task(made.run(group))
            async with asyncio.timeout(60):
                while any(episode.num_turns == 0 for episode in group):
                    await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while tool.cleaned < 4:
                    await asyncio.sleep(0.01)
            return tool.cleaned

    async def engine_aborts() -> None:
        async def none(*args: object) -> None:
            return None

        async with runner(tmp_path, none, "answer") as made:
            with pytest.raises(asyncio.CancelledError):
                await made.run(episodes())

    assert in_loop(cancel_while_the_tool_works) == 4, "cancelled, so that they can clean up"
    in_loop(engine_aborts)


@pytest.mark.parametrize(("mode", "text"), [("broken", "OSError: no such"), ("leaving", "SystemExit: no licence")])
def test_a_class_that_cannot_be_made(tmp_path: Path, mode: str, text: str) -> None:
    async def test() -> None:
        async with runner(tmp_path, Writer().generate, mode):
            pass

    with refuses(ConfigError, f"agent_kwargs={{'mode': '{mode}', 'api_key': '***'}}", "Tool()", *text.split(": ")):
        in_loop(test)
