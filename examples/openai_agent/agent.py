"""An agent that knows nothing of training: it has an address and a key, and uses the `openai` package.

It asks for a sum, and where the answer has no `####` in it, once more. By hand, against any OpenAI-compatible server:

    python examples/openai_agent/agent.py http://127.0.0.1:8000/v1 "123+456=?"
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

from openai import AsyncOpenAI

# Making a client takes longer than a call: each episode has a copy of this one with its own address and key.
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)


async def play(task: dict[str, Any], base_url: str, token: str) -> dict[str, Any]:
    """Ask, and say whether the answer is right.

    Args:
        task: the row's `extra_info`, and its `messages`.
        base_url: where the policy is.
        token: the key.
    """
    client = CLIENT.with_options(base_url=base_url, api_key=token)
    messages = list(task["messages"])
    answer = ""
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=64)
        answer = reply.choices[0].message.content or ""
        if "####" in answer:
            break
        messages += [{"role": "assistant", "content": answer}, task["messages"][-1]]
    a, b = map(int, re.findall(r"\d+", task["messages"][-1]["content"])[:2])
    found = re.search(r"#### (\d+)", answer)
    right = float(found is not None and int(found[1]) == a + b)
    return {"reward": right, "metrics": {"acc": right, "asked": (len(messages) + 1) / 2}}


if __name__ == "__main__":
    address, question = sys.argv[1:]
    print(asyncio.run(play({"messages": [{"role": "user", "content": question}]}, address, "none")))
