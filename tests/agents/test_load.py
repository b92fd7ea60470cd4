"""Many episodes at once at the endpoint, by a server that raises, hangs, and is killed in the middle.

The engine and the app are made up; `python -m benchmarks.episodes` and its test have real ones.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

import pytest

from grpo_dist.agents import Episode, Row
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError
from tests.agents.fakes import Characters
from tests.agents.gateways import serving
from tests.worker_settings import agent

GROUPS, N = 64, 4
# Becomes the server once it reads a line; kills itself at the n-th episode.
SERVER = """
import asyncio, json, os, signal, sys
import httpx, uvicorn

attempts, asked = {}, 0
client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


async def play(task, address, token):
    global asked
    asked += 1
    if asked == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    number = attempts[task["name"]] = attempts.get(task["name"], 0) + 1
    for turn in range(2):
        if turn and number <= task["raises"]:
            raise OSError("no free port")
        if turn and number <= task["hangs"]:
            await asyncio.sleep(1000)
        body = b"a" * (turn + 1)
        answer = await client.post(address + "/completions", content=body, headers={"x-api-key": token})
        answer.raise_for_status()
    return {"ok": True, "reward": 1.0}


async def app(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    asked = json.loads(body)
    try:
        answer = await play(asked["task"], asked["base_url"], asked["token"])
    except Exception as error:
        answer = {"ok": False, "error": repr(error)}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


print("imported", flush=True)
sys.stdin.readline()
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical", lifespan="off", backlog=1024)
"""


async def generate(prompt: list[int], sampling: SamplingSettings, uid: str | None = None) -> list[Response]:
    await asyncio.sleep(0.2)
    return [Response([66], [-0.5], False, [3])]


def group(index: int) -> list[Episode]:
    """The first attempts of some episodes fail, and all of the first episode of group 10."""
    episodes = []
    for i in range(N):
        raises, hangs = int((index + i) % 20 == 3), int((index + i) % 50 == 7)
        task = {"name": f"{index} {i}", "raises": 3 if (index, i) == (10, 0) else raises, "hangs": hangs}
        row, sampling = Row(f"prompt{index}", [81], extra_info=task), SamplingSettings(N, 1.0, 1.0, -1, 50, 7)
        episodes.append(Episode(row, sampling, index=i, tokenizer=Characters(), max_model_len=90))
    return episodes


async def server(port: int, dies_after: int) -> asyncio.subprocess.Process:
    command, pipe = (sys.executable, "-c", SERVER, str(port), str(dies_after)), asyncio.subprocess.PIPE
    found = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    await found.stdout.readline()
    return found


@pytest.mark.long
async def test_each_group_ends_once_or_has_failed_with_its_kind() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    attempts: list[AgentError] = []
    async with asyncio.timeout(280), serving() as gateway:
        servers = [await server(port, GROUPS * N - 20), await server(port, 0)]
        runner = EpisodeRunner(agent("external", {"url": f"http://127.0.0.1:{port}/"}, timeout_s=60.0), generate, gateway)
        await runner.start()
        running = [asyncio.create_task(runner.run(group(index), None, attempts)) for index in range(GROUPS)]
        await asyncio.sleep(0)
        try:
            servers[0].stdin.write(b"\n")  # the episodes are there before it
            assert await servers[0].wait() == -signal.SIGKILL
            servers[1].stdin.write(b"\n")
            ended = await asyncio.gather(*running, return_exceptions=True)
        finally:
            for process in servers:
                if process.returncode is None:
                    process.kill()  # what hangs in it would be waited for
                    await process.wait()
            await runner.stop()
        assert not gateway._sessions, "each has ended"
    for index, found in enumerate(ended):
        if isinstance(found, BaseException):
            assert isinstance(found, AgentError), found
        else:
            assert [(e.reward, e.num_turns, bytes(e.prompt_ids), e.row.uid) for e in found] == [
                (1.0, 2, b"a", f"prompt{index}")
            ] * N
    assert isinstance(ended[10], AgentError)
    assert {"error", "failed", "timeout"} <= {error.kind for error in attempts}, "when it died, what raised, what hung"
