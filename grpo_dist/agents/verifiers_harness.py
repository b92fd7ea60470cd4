"""A harness of `verifiers` 0.4 whose chat loop runs in the worker's own process; verifiers_worker.py names it.

verifiers' own chat loop, `null`, is a program that is started for each episode, which takes about a second of a
processor. For a task without tools it asks the model once; that is done here. Runs without grpo_dist.
"""

from __future__ import annotations

from typing import Any

from openai import APIError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses import NullHarness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Chat"]

# To make a client takes longer than to use it: each episode has a copy of this one.
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=None)


class Chat(NullHarness):
    """verifiers' plain chat loop; in this process where the task has no tools."""

    async def setup(self, runtime: Any) -> None:
        """The program is prepared by the first task that needs it."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **options: Any
    ) -> ProgramResult:
        """Ask the model; see verifiers' `Harness.launch`."""
        if mcp_urls:
            return await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data, **options)
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        client = CLIENT.with_options(base_url=endpoint, api_key=secret)
        try:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        except APIError as error:  # verifiers knows better why, if the policy has refused
            return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")
