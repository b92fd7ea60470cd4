"""Episodes side by side on a thread of their own: order, limits, failures, abort. What is an agent loop at all."""

import asyncio
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.agents import Episode, load_agent_loop
from grpo_dist.agents import runner as module
from grpo_dist.agents.base import AGENT_LOOP
from grpo_dist.agents.gateway import Session
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError, ConfigError, EngineError
from grpo_dist.plugins.names import AGENT_LOOPS
from grpo_dist.rewards.scorer import OutputLines, printing_to
from tests.agents.fakes import Writer, until
from tests.agents.loops import LOOPS, episodes, runner
from tests.messages import refuses, says


async def test_responses_come_in_order_whoever_is_done_first(tmp_path: Path) -> None:
    lines = OutputLines()
    async with runner(tmp_path, Writer(*["1+1="] * 4).generate, "answer") as made:
        with printing_to(lines):
            responses = [episode.response() for episode in await made.run(episodes())]
    assert lines.take() == ([f"episode {i}" for i in range(4)], 0), "what the loop prints on its thread"
    assert [bytes(response.token_ids) for response in responses] == [f"1+1={i}\0".encode() for i in range(4)]
    assert [response.mask for response in responses] == [[1, 1, 1, 1, 0, 1]] * 4


ITS_LINE = 1 + next(number for number, line in enumerate(LOOPS.splitlines()) if "its line is told" in line)
LEAVES = ["run()", "SystemExit: 3", "tool.py:", "step1-prompt9", "episode"]


async def test_failures_are_named_and_the_last_one_ends_the_group(tmp_path: Path) -> None:
    for mode, parts in (
        ("fail", ["tool.py:Tool", "run()", "KeyError: 'calculator'", "step1-prompt9", "episode 2", "turn 1"]),
        ("own_timeout", ["run()", "TimeoutError"]),
        ("own_cancel", ["run()", "CancelledError", "tool.py:", "catch"]),
        ("no_text", ["TypeError: episode.append", "3 (int)", f"tool.py:{ITS_LINE}"]),
        ("leave", LEAVES),
        ("task_leaves", LEAVES),
    ):
        with refuses(AgentError, *parts):
            async with runner(tmp_path, Writer(*["1+1="] * 16).generate, mode) as made:
                await made.run(episodes())


async def test_a_loop_that_blocks_its_thread_is_named_and_its_process_must_go(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.1)
    with refuses(EngineError, "Tool: run()", "thread", "timeout_s=3", "tool.py:", "await"):
        async with runner(tmp_path, Writer(*["1+1="] * 4).generate, "block", timeout_s=3.0) as made:
            await made.run(episodes())


async def test_a_thread_that_wakes_after_the_stop_asks_the_engine_for_nothing(tmp_path: Path) -> None:
    """Its event loop may be closed by then: a request would be made that nobody awaits."""
    writer = Writer("1+1=")
    async with runner(tmp_path, writer.generate, "answer") as made:
        sample = made._sampler("p", asyncio.get_running_loop(), asyncio.timeout(None), module._Group(0, []))
    with pytest.raises(asyncio.CancelledError, match="over"):
        await sample([1], SamplingSettings(1, 1.0, 1.0, -1, 4, 0))
    assert writer.asked == []


async def test_what_fails_in_all_attempts_has_its_reason(tmp_path: Path) -> None:
    for name, mode, kind, parts in (
        ("Tool", "give_up", "failed", ["episode.fail", "free port"]),
        ("Tool", "no_reward", "error", ["episode.reward", "finite"]),
        ("Tool", "no_metrics", "error", ["AttributeError"]),
        ("Judge", "answer", "error", ["Judge", "gives_reward", "episode.reward"]),
    ):
        with refuses(AgentError, *parts, "first", "step1-prompt9") as caught:
            async with runner(tmp_path, Writer(*["1+1=", ""] * 3).generate, mode, name) as made:
                await made.run(episodes(1))
        assert caught.value.kind == kind


@pytest.mark.parametrize("limit", ["timeout_s", "episode_timeout_s"])
async def test_what_takes_too_long_is_truncated_and_scored_if_it_can_be(tmp_path: Path, limit: str) -> None:
    """Sampling runs where `run` was called, and its time counts for the whole episode alone."""
    here, writer = asyncio.get_running_loop(), Writer(*["1+1="] * 2)

    async def slow(*args: Any) -> list[Response] | None:
        assert asyncio.get_running_loop() is here
        await asyncio.sleep(0.7 if limit == "timeout_s" else 0)
        return await writer.generate(*args)

    async with runner(tmp_path, slow, "hang", **{limit: 0.5}) as made:
        ended = await made.run(episodes(2))
    assert [(episode.truncated, episode.num_turns, episode.attempt) for episode in ended] == [(True, 1, 0)] * 2
    with refuses(AgentError, "Judge", f"agent.{limit}=0.5") as caught:
        async with runner(tmp_path, Writer(*["1+1="] * 6).generate, "hang", "Judge", **{limit: 0.5}) as made:
            await made.run(episodes(2))
    assert caught.value.kind == "timeout"


async def test_a_loop_that_asks_for_ever_more_turns_is_ended_and_scored(tmp_path: Path) -> None:
    writer = Writer(*["1+1="] * 9)
    async with runner(tmp_path, writer.generate, "forever", "Judge", max_assistant_turns=3) as made:
        (episode,) = await made.run(episodes(1, max_turns=3))
    assert (episode.num_turns, episode.truncated, episode.outcome(), episode.attempt) == (3, True, -1.0, 0)


@pytest.mark.parametrize(("limit", "most"), [(None, 4), (2, 2)])
async def test_so_many_episodes_run_at_the_same_time(tmp_path: Path, limit: int | None, most: int) -> None:
    async with runner(tmp_path, Writer(*["1+1="] * 4).generate, "count", max_concurrent_episodes=limit) as made:
        await made.run(episodes())
        assert type(made._loop).most == most


@pytest.mark.parametrize("name", ["Tool", "Stoic"])
async def test_an_error_of_the_engine_stays_what_it_is(tmp_path: Path, name: str) -> None:
    """Also where the agent makes something of it: it sees a failed request, and gives the episode a reward for it."""

    async def dead(*args: object) -> list[Response]:
        raise EngineError("vLLM failed")

    with refuses(EngineError, "vLLM failed"):
        async with runner(tmp_path, dead, "answer", name) as made:
            await made.run(episodes())


async def begun(made: EpisodeRunner) -> tuple[asyncio.Task[list[Episode]], Any]:
    """Start a group whose episodes have all had a turn and are in the tool now; its task, and the tool's class."""
    group = episodes()
    task = asyncio.create_task(made.run(group))
    await until(lambda: all(episode.num_turns for episode in group))
    return task, type(made._loop)


async def test_abort_ends_episodes_in_the_tool_and_in_the_engine(tmp_path: Path) -> None:
    async with runner(tmp_path, Writer(*["1+1="] * 4).generate, "hang") as made:
        task, tool = await begun(made)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: tool.cleaned == 4)  # cancelled, so that they can clean up

    async def aborted(*args: object) -> None:
        return None

    with pytest.raises(asyncio.CancelledError):
        async with runner(tmp_path, aborted, "answer") as made:
            await made.run(episodes())


@pytest.fixture
def all_awaited() -> Iterator[None]:
    """What a test leaves behind has been awaited."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert not [str(warning.message) for warning in warned if "never awaited" in str(warning.message)]


async def test_the_end_of_the_run_ends_episodes_before_the_loop(tmp_path: Path, all_awaited: None) -> None:
    async with runner(tmp_path, Writer(*["1+1="] * 4).generate, "hang") as made:
        task, tool = await begun(made)
        async with asyncio.timeout(60):
            await made.stop()
        assert not made._thread.is_alive()
        assert (tool.cleaned, tool.closed) == (4, 4), "the episodes, and when it was closed"
        for asked in (task, made.run(episodes())):
            with pytest.raises(asyncio.CancelledError):
                await asked


class Doors:
    """A gateway that opens and closes sessions when it is told to."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.may_open, self.may_close, self.closing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.sessions: list[Session] = []
        self.num_closed = 0

    async def open(self, session: Session) -> None:
        self.sessions.append(session)
        await self.may_open.wait()

    async def close(self, session: Session) -> None:
        self.closing.set()
        await self.may_close.wait()
        self.num_closed += 1


@pytest.mark.parametrize("moment", ["opening", "closing", "stopped"])
async def test_a_session_ends_whenever_its_episode_is_cancelled(tmp_path: Path, moment: str, all_awaited: None) -> None:
    doors = Doors()
    async with runner(tmp_path, Writer().generate, name="Visitor", gateway=doors) as made:
        running = asyncio.create_task(made.run(episodes(1)))
        await until(lambda: doors.sessions)
        if moment != "opening":  # the episode has ended, and its session is about to
            doors.may_open.set()
            await doors.closing.wait()
        if moment == "stopped":
            doors.may_close.set()
            await made.stop()
            assert await doors.sessions[0].sample([1], SamplingSettings(1, 1.0, 1.0, -1, 30, 5)) is None
        else:
            running.cancel()
        await asyncio.wait({running})
        doors.may_close.set()
        await until(lambda: doors.num_closed)


@pytest.mark.parametrize(("mode", "text"), [("broken", "OSError: no such"), ("leaving", "SystemExit: no licence")])
async def test_a_class_that_cannot_be_made(tmp_path: Path, mode: str, text: str) -> None:
    with refuses(ConfigError, f"agent_kwargs={{'mode': '{mode}', 'api_key': '***'}}", "Tool()", *text.split(": ")):
        async with runner(tmp_path, Writer().generate, mode):
            pass


# --- an episode that fails is sampled again alone: seeds, the others of its group, and what that throws away -------
class Engine:
    """Writes x where the seed is one of `bad`; else a."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.seeds = bad, list[int]()

    async def generate(self, prompt: list[int], sampling: SamplingSettings, request_id: Any) -> list[Response]:
        assert sampling.seed is not None
        self.seeds.append(sampling.seed)
        return [Response([ord("x" if sampling.seed in self.bad else "a"), 0], [-0.5] * 2, False, [3] * 2)]


# of blake2b("7/attempt/1") and of 2, 8 bytes, the first 30 bits
SEEDS_OF_EPISODE_2 = [7, 187303685, 415678196]


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_a_failed_episode_alone_is_sampled_again_with_its_own_next_seed(tmp_path: Path, most: int) -> None:
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
    async with runner(tmp_path, Engine(7).generate, name="Filter", kwargs={}) as made:
        ended = await made.run(episodes(), None, failed)
    assert [(episode.text, episode.attempt) for episode in ended] == [("a", 0), ("a", 0), ("a", 1), ("a", 0)]
    assert [error.kind for error in failed] == ["rejected"]
    says(str(failed[0]), "episode.reject", "an x")


# --- what is an agent loop at all ------------------------------------------------------------------------------------
CLASSES = """
from grpo_dist.agents import AgentLoop
class Good(AgentLoop):
    def __init__(self, *, depth=2): ...
    async def run(self, episode): ...
class NotAsync(AgentLoop):
    def run(self, episode): ...
class NoEpisode(AgentLoop):
    async def run(self): ...
class NoRun(AgentLoop): ...
class Other: ...
"""


def test_names_are_those_of_the_registry() -> None:
    assert AGENT_LOOP.names() == sorted(AGENT_LOOPS)


def test_what_is_no_agent_loop(tmp_path: Path) -> None:
    for name, kwargs, parts in (
        ("Other", {}, ["class", "grpo_dist.agents.AgentLoop"]),
        ("NoRun", {}, ["NoRun", "`async def run(self, episode)`"]),
        ("NotAsync", {}, ["NotAsync", "`async def run(self, episode)`"]),
        ("NoEpisode", {}, ["NoEpisode", "`async def run(self, episode)`"]),
        ("Goood", {}, ["'Good'"]),
        ("Good", {"api_key": "SECRET123"}, ["agent_kwargs={'api_key': '***'}", "Good:", " 'api_key'"]),
        ("single_turn_agent", {"depth": 1}, ["agent_kwargs={'depth': 1}", "SingleTurn"]),
    ):
        (tmp_path / "loops.py").write_text(CLASSES)
        with refuses(ConfigError, *parts):
            load_agent_loop(name if "_" in name else f"{tmp_path}/loops.py:{name}", kwargs)
