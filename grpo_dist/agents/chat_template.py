"""What a model's chat template writes around the turns of an episode.

The policy's own tokens stand in the episode as they were sampled, whatever the template would make of their text. So
what is put in behind them is cut out of a rendered conversation, in which a mark stands for what the policy wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grpo_dist.assets.model_folder import continued

Message = Mapping[str, Any]

MARK = "grpo_dist_mark"  # what a template may take for a name or a text, and no conversation has
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def tool_call(index: int, name: str) -> dict[str, Any]:
    """A call as a message of the assistant has it, with an id that every template takes: nine letters and digits."""
    return {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": {}}}


def rendered(tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any], *, goes_on: bool = True) -> str:
    """A conversation as the template writes it, up to where the policy goes on or, without that, to its end."""
    options = {"tokenize": False, "add_generation_prompt": goes_on}
    text = str(tokenizer.apply_chat_template(list(messages), **options, **variables))
    return text.encode(errors="replace").decode()  # JSON may escape half a character, which no tokenizer takes


def behind_turn(
    tokenizer: Any,
    messages: Sequence[Message],
    added: Sequence[Message],
    *,
    calls: Sequence[Message] = (),
    ends: Collection[str],
    is_ended: bool,
    template_kwargs: Mapping[str, Any],
) -> str:
    """Return what the chat template writes from the end of a turn of the policy to where the policy goes on.

    Args:
        messages: those in front of the turn.
        added: those behind it.
        calls: of tools, that the turn has made, as `tool_call` has them.
        ends: tokens that may end a turn.
        is_ended: whether the turn has such a token already; else the template's stands at the beginning.
    """
    text = rendered(tokenizer, continued(messages, [_turn(calls), *added]), template_kwargs)
    start = text.find(MARK)
    endings = [(text.index(end, start), end) for end in ends if start >= 0 and end in text[start:]]
    if not endings:
        shown = ", ".join(map(repr, sorted(ends)))
        raise ValueError(f"the model's chat template does not end a turn of the policy with an end token ({shown})")
    at, end = min(endings)
    return text[at + len(end) :] if is_ended else text[at:]


def opening_of_calls(tokenizer: Any, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> str | None:
    """The first tag of a call of a tool, such as <tool_call>; None: calls begin without one."""
    call = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, MARK)]}
    turns = [[*messages, turn] for turn in (call, _turn(()))]
    called, said = (rendered(tokenizer, turn, template_kwargs, goes_on=False) for turn in turns)
    front = called[: called.find(MARK)]
    tag = _TAG.search(front[len(os.path.commonprefix([front, said])) :])
    return tag[0] if tag else None


def _turn(calls: Sequence[Message]) -> Message:
    """A turn of the policy; the mark is the last thing in it."""
    if not calls:
        return {"role": "assistant", "content": MARK}
    named = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    named[-1]["function"]["arguments"] = {MARK: ""}
    return {"role": "assistant", "content": "", "tool_calls": named}
