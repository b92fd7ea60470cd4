"""Qwen3's chat template with a tokenizer of bytes, and a policy that says what it was told to."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.agents import AgentLoop, Episode, Row
from grpo_dist.assets import resolve_model_path
from grpo_dist.data import load_tokenizer
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings

QWEN3 = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text()
MESSAGES = [{"role": "user", "content": "What is 2+3?"}]
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

def divide(a: float, b: float) -> float:
    """Divide a number by another one.

    Args:
        a: The first number.
        b: The second number.
    """
    return a / b
'''
# The calls of Hermes' form, but for what stands around them.
PARSER = """
import json
import re

def parse(text):
    try:
        found = [json.loads(each) for each in re.findall("<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    except ValueError:
        return []
    return [(call["name"], json.dumps(call["arguments"])) for call in found]
"""


def tokenizer_of(template: str | None = QWEN3) -> Any:
    """The built-in model's, which has a token for each byte and Qwen3's <|im_start|> and <|im_end|>."""
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny-qwen3"), trust_remote_code=False)
    tokenizer.chat_template = template
    return tokenizer


def call(name: str, arguments: str) -> str:
    """A call in Hermes' form."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Speaker:
    """Samples these turns, one after the other: texts, which it ends, or tokens. Every token has log-prob -0.5."""

    def __init__(self, tokenizer: Any, *turns: str | list[int]) -> None:
        self.tokenizer, self.turns, self.asked = tokenizer, list(turns), 0

    async def sample(self, prompt: list[int], sampling: SamplingSettings) -> Response:
        await asyncio.sleep(0)
        turn, self.asked = self.turns.pop(0), self.asked + 1
        ids = turn if isinstance(turn, list) else [*self.encode(turn), self.tokenizer.eos_token_id]
        cut, ids = len(ids) > sampling.max_tokens, ids[: sampling.max_tokens]
        return Response(ids, [-0.5] * len(ids), cut, [3] * len(ids))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def play(
    loop: AgentLoop,
    speaker: Speaker,
    template_kwargs: dict[str, Any],
    *,
    messages: Sequence[dict[str, Any]] = MESSAGES,
    max_tokens: int = 3000,
    max_turns: int | None = None,
    extra_info: Mapping[str, Any] | None = None,
) -> Episode:
    """An episode of the loop, played to its end."""
    tokenizer = speaker.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_kwargs)
    sampling = SamplingSettings(1, 1.0, 1.0, -1, max_tokens, 5)
    limits: dict[str, Any] = {"max_model_len": 10_000, "max_turns": max_turns, "template_kwargs": template_kwargs}
    row = Row("p1", speaker.encode(text), messages, extra_info=extra_info or {})
    episode = Episode(row, sampling, tokenizer=tokenizer, **limits)
    episode.connect(speaker.sample)
    asyncio.run(loop.run(episode))
    return episode


def parts(episode: Episode) -> list[tuple[int, str]]:
    """Who wrote what: 1 and what was sampled, 0 and what was put in."""
    found: list[tuple[int, list[int]]] = []
    for token, mask in zip(episode.token_ids, episode.response().mask or [], strict=True):
        if not found or found[-1][0] != mask:
            found.append((mask, []))
        found[-1][1].append(token)
    return [(mask, episode.tokenizer.decode(ids, skip_special_tokens=False)) for mask, ids in found]
