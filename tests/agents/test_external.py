"""Episodes that a program or a server plays; the endpoint is made up."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_dist.agents import Episode, External, Row, external, verifiers_worker
from grpo_dist.agents.episode import Endpoint
from grpo_dist.agents.recording import Recording
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError
from tests.agents.fakes import Characters
from tests.messages import refuses

PROGRAM = """
import asyncio, os, pickle, sys, time

import helper  # beside it

async def play(task, base_url, token):
    assert "grpo_dist" not in sys.modules and os.environ.get("PYTHONPATH") is None
    assert pickle.loads(pickle.dumps(play)) is play  # as a pool of processes does
    print("playing", task["what"], flush=True)
    if task["what"] == "raise":
        raise OSError("no free port")
    if task["what"] == "cancelled":
        raise asyncio.CancelledError("mine")
    if task["what"] == "die":
        os._exit(3)
    if task["what"] == "hang":
        try:
            await asyncio.sleep(1000)
        finally:
            open(task["file"], "w").close()
    if task["what"] == "block":
        await asyncio.to_thread(time.sleep, 1000)
    if task["what"] == "leave":
        sys.exit("no licence")
    if task["what"] == "object":
        return {"reward": object()}
    if task["what"] == "nonsense":
        return {"reward": 1.0, "color": "red"}
    await asyncio.sleep(task.get("seconds", 0))
    return {"reward": len(token) + task["number"], "metrics": {"messages": len(task["messages"])}, "truncated": True}
"""


@asynccontextmanager
async def endpoint(recording: Recording) -> AsyncIterator[Endpoint]:
    call, _ = recording.begin([81], is_chat=False)
    recording.end(call, Response([65, 66, 0], [-0.5] * 3, False, [3] * 3))
    yield Endpoint("http://127.0.0.1:1/v1", "secret")


def episode(**task: Any) -> Episode:
    row = Row("u", [1, 2], [{"role": "user", "content": "hi"}], "games", task)
    found = Episode(row, SamplingSettings(1, 1.0, 1.0, -1, 30, 5), tokenizer=Characters(), max_model_len=90)
    found.connect(None, endpoint)
    return found


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "helper.py").touch()
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return f"{file}:play"


async def test_episodes_are_played_side_by_side_by_one_process(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    loop = External(play=program)
    slow, quick = episode(what="play", number=1, seconds=0.5), episode(what="play", number=2)
    done: list[Episode] = []

    async def run(each: Episode) -> None:
        await loop.run(each)
        done.append(each)

    await asyncio.gather(run(slow), run(quick))
    assert done == [quick, slow]
    assert (slow.reward, quick.reward) == (len("secret") + 1, len("secret") + 2)
    assert slow.metrics == {"delivered_tokens": 1.0, "messages": 1}
    assert slow.truncated
    assert (slow.prompt_ids, slow.response().token_ids) == ([81], [65, 66, 0])
    assert "playing play" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raise", "OSError: no free port"),
        ("leave", "SystemExit: no licence"),
        ("object", "TypeError: Object of type object is not JSON serializable"),
        ("cancelled", "asyncio.exceptions.CancelledError: mine"),
    ],
)
async def test_what_fails_there_is_told_and_it_plays_on(program: str, what: str, told: str, capfd: Any) -> None:
    """Its traceback is printed once, however many episodes end with it."""
    loop, good = External(play=program), episode(what="play", number=1)
    for bad in (episode(what=what), episode(what=what)):
        await loop.run(bad)
        assert bad.failure == told
    assert capfd.readouterr().err.count("Traceback") == 1
    with refuses(ValueError, "color", "reward"):
        await loop.run(episode(what="nonsense"))
    await loop.run(good)
    assert good.reward is not None


CHATTY = """
import json, sys
asked = json.loads(sys.stdin.readline())
answer = json.dumps({"id": asked["id"], "ok": True, "reward": 2})
print({"id": [1]}, '{"id": [1]}', "{not json", "[" * 10_000, answer, sep=chr(10), flush=True)
sys.stdin.readline()
"""


async def test_what_is_no_answer_is_printed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    loop, played = External(command=[sys.executable, "-c", CHATTY]), episode(what="play")
    await loop.run(played)
    await loop.close()
    assert played.reward == 2
    assert "{not json" in capfd.readouterr().out
    with refuses(RuntimeError, f"{tmp_path}/nothing", "exit code 1"):
        await External(command=[f"{tmp_path}/nothing"]).run(episode(what="play"))


async def test_a_process_that_dies_and_an_episode_that_ends(program: str, tmp_path: Path) -> None:
    loop = External(play=program)
    playing = asyncio.create_task(loop.run(episode(what="hang", file=os.devnull)))
    await asyncio.sleep(0)
    with refuses(RuntimeError, "program.py", "exit code"):
        await loop.run(episode(what="die"))
    with refuses(RuntimeError, "program.py"):
        await playing
    again = episode(what="play", number=1)
    await loop.run(again)
    assert again.reward is not None
    task = asyncio.create_task(loop.run(episode(what="hang", file=str(tmp_path / "ended"))))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while not (tmp_path / "ended").exists():
        await asyncio.sleep(0.01)


async def test_threads_that_hang_hold_up_no_other_episode_and_closing_ends_the_process(program: str) -> None:
    """More of them than Python has for `asyncio.to_thread`. The process has a guard, which ends too."""
    before = set(psutil.Process().children(recursive=True))
    loop = External(play=program)
    blocked = [asyncio.create_task(loop.run(episode(what="block"))) for _ in range(40)]
    await asyncio.sleep(0)
    for task in blocked[:20]:
        task.cancel()
    played = episode(what="play", number=1)
    await loop.run(played)
    assert played.reward is not None
    started = set(psutil.Process().children(recursive=True)) - before
    await loop.close()
    ended = await asyncio.gather(*blocked, return_exceptions=True)
    assert [isinstance(each, RuntimeError) for each in ended] == [False] * 20 + [True] * 20
    await External(play=program).close()  # never started
    assert started
    assert not psutil.wait_procs(started, timeout=30)[1]


class Server:
    """Answers each POST with the next of these statuses, and then 200, once so many have come."""

    def __init__(self, *statuses: int, together: int = 1) -> None:
        self.statuses, self.together = list(statuses), together
        self.asked: list[dict[str, Any]] = []
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/play"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        self.all_there = asyncio.Event()
        server = await asyncio.start_server(self.answer, sock=self.socket, backlog=1000)
        try:
            yield
        finally:
            server.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0])
        self.asked.append(json.loads(await reader.readexactly(length)))
        if len(self.asked) == self.together:
            self.all_there.set()
        await self.all_there.wait()
        status = self.statuses.pop(0) if self.statuses else 200
        body = json.dumps({"ok": True, "reward": 0.5}).encode()
        head = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()


@pytest.mark.deep  # 250 connections
async def test_a_server_plays_any_number_of_episodes_at_the_same_time() -> None:
    server = Server(together=250)  # HTTP clients have 100 connections by default
    loop, played = External(url=server.url), [episode(what="play") for _ in range(server.together)]
    async with server.listening():
        await asyncio.gather(*map(loop.run, played))
    await loop.close()
    assert {each.reward for each in played} == {0.5}


async def test_a_server_that_is_not_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No episode has failed meanwhile. Then it listens, says that it is not ready, and plays."""
    monkeypatch.setattr(external, "FIRST_WAIT_S", 0.01)
    server = Server(503, 503)
    loop, played, refused = External(url=server.url), episode(what="play"), asyncio.Event()
    sleep = asyncio.sleep

    async def waits(seconds: float) -> None:
        refused.set()
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", waits)
    playing = asyncio.create_task(loop.run(played))
    await refused.wait()
    async with server.listening():
        await playing
    await loop.close()
    assert (played.reward, played.failure, len(server.asked)) == (0.5, None, 3)
    messages = [{"role": "user", "content": "hi"}]
    task = {"what": "play", "messages": messages, "data_source": "games"}
    assert [(asked["task"], asked["token"]) for asked in server.asked] == [(task, "secret")] * 3


@pytest.mark.parametrize(
    ("statuses", "told"),
    [((), ["ConnectError", "0.2 s"]), ((503,) * 100, ["status 503", "0.2 s"]), ((500,), ["status 500", "/play"])],
)
async def test_what_fails_for_good(statuses: Any, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "SERVER_S", 0.2)
    server, played = Server(*statuses), episode(what="play")
    with refuses(RuntimeError, server.url, *told):
        async with server.listening() if statuses else nullcontext():
            await External(url=server.url).run(played)
    server.socket.close()


def test_the_function_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").touch()
    for given, found in (
        ({"play": "game.py:play", "python": "py"}, {"play": f"{tmp_path}/game.py:play", "python": "py"}),
        ({"url": "http://b"}, {"url": "http://b"}),
        ({"play": "grpo_dist.agents.verifiers_worker:play"}, {"play": f"{verifiers_worker.__file__}:play"}),
    ):
        assert External.resolved(given) == found
    for wrong in ("none.py:play", "game.py", "no.such:play", "json", 3):
        with refuses(ConfigError, "agent_kwargs.play", str(wrong)):
            External.resolved({"play": wrong})


@pytest.mark.parametrize("arguments", [{}, {"command": ["a"], "url": "http://b"}, {"play": "a.py:b", "command": ["a"]}])
def test_it_is_a_function_a_program_or_a_server(arguments: dict[str, Any]) -> None:
    with refuses(ConfigError, "agent_kwargs", "play", "command", "url"):
        External(**arguments)
