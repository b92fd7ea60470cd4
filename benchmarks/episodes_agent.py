"""The agent of episodes.py: a sum in two turns, and attempts that raise or hang, a row says how many.

    python benchmarks/episodes_agent.py PORT [LAST]      a server; it dies with the LAST episode that it is asked for

It knows nothing of grpo_dist.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from typing import Any

from openai import AsyncOpenAI

# Making a client takes longer than a call: each episode has a copy of this one with its own address and key.
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)
CHANCE = random.Random(1)


async def play(task: dict[str, Any], base_url: str, token: str) -> dict[str, Any]:
    """Ask twice; between the turns a share `raises` of all attempts raises, and a share `hangs` never goes on."""
    client = CLIENT.with_options(base_url=base_url, api_key=token)
    messages, right = list(task["messages"]), 0.0
    a, b = map(int, re.findall(r"\d+", messages[-1]["content"])[:2])
    chance = CHANCE.random()
    for turn in range(2):
        if turn and chance < task["raises"]:
            raise OSError("no free port")
        if turn and chance < task["raises"] + task["hangs"]:
            await asyncio.Event().wait()
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=48)
        answer = reply.choices[0].message.content or ""
        found = re.search(r"#### (\d+)", answer)
        right += 0.5 * (found is not None and int(found[1]) == a + b)
        messages += [{"role": "assistant", "content": answer}, task["messages"][-1]]
    return {"reward": right}


class Server:
    """An ASGI app: an episode is a POST."""

    def __init__(self, last: int | None) -> None:
        self.last, self.num_asked = last, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Play it."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.num_asked += 1
        if self.num_asked == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        asked = json.loads(body)
        try:
            answer = {"ok": True, **await play(asked["task"], asked["base_url"], asked["token"])}
        except Exception as error:  # noqa: BLE001 - it is told, and costs one episode
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


if __name__ == "__main__":
    import uvicorn

    port, *more = map(int, sys.argv[1:])
    uvicorn.run(Server(more[0] if more else None), port=port, log_level="critical", lifespan="off", backlog=1024)
