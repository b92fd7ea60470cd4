"""Prompts to token ids: chat template, length limit, truncation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_dist.data.conversations import (
    KWARGS_KEY,
    check_template_kwargs,
    open_text_ids,
    row_errors,
    template_problem,
)
from grpo_dist.data.images import ImageProcessor, as_parts
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import DataError
from grpo_dist.redact import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SHOWN = 80  # characters of a system prompt
MOST_ROWS_NAMED = 5  # in a message; the others are counted


@dataclass(frozen=True, eq=False)
class TokenizedPrompt:
    """A prompt and its token ids ([P] int32, P <= data.max_prompt_length), generation prompt included."""

    prompt: Prompt
    token_ids: np.ndarray


def tokenize_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    truncation: str,
    filter_overlong_prompts: bool,
    apply_chat_template_kwargs: Mapping[str, Any],
    image_processor: ImageProcessor | None = None,
) -> tuple[list[TokenizedPrompt], list[Prompt]]:
    """Apply the chat template and the length limit; also returns the overlong prompts, which were left out or cut.

    A prompt that ends in a turn of the assistant is not closed: the response goes on from that turn.

    A tokenizer without a chat template (a base model), or of a plain prompt, gets the contents of the messages, in
    order, joined by newlines, with the special tokens it puts in front of any text (such as BOS); roles are left out
    and nothing marks the end of the prompt, so the response continues the last line.

    Args:
        max_prompt_length: most tokens per prompt, template included.
        truncation: for overlong prompts that are not filtered: "error"; or the part that is cut: "left",
            "right", or "middle" (keeps the first max_prompt_length // 2 tokens, the rest from the end).

    Raises:
        DataError: the template refuses a row, a prompt is empty or (truncation "error") overlong, or no prompt is left.
    """
    check_template_kwargs(tokenizer, apply_chat_template_kwargs)
    tokenized: list[TokenizedPrompt] = []
    overlong: list[Prompt] = []
    first = 0
    for prompt in prompts:
        token_ids = prompt_ids(prompt, tokenizer, apply_chat_template_kwargs)
        if image_processor is not None and prompt.images:
            token_ids = image_processor.put_in(token_ids, prompt.images, prompt.location)
        first = first or len(token_ids)
        if len(token_ids) > max_prompt_length:
            overlong.append(prompt)
            if filter_overlong_prompts:
                continue
            cut = "error" if prompt.images else truncation  # a part of an image is none
            token_ids = _truncate(token_ids, max_prompt_length, cut, prompt.location)
        tokenized.append(TokenizedPrompt(prompt, np.asarray(token_ids, dtype=np.int32)))
    if prompts and not tokenized:
        raise DataError(
            f"data.max_prompt_length={max_prompt_length}: all {len(overlong)} prompts are longer, none is "
            f"left (the first, {prompts[0].location}, has {first} tokens); raise it, or cut them: "
            f"data.filter_overlong_prompts=false data.truncation=left"
        )
    return tokenized, overlong


def check_token_ids(largest: Iterable[tuple[str, int]], vocab_size: int, *, setting: str) -> None:
    """Check that the model has an embedding for every token, by where each row is and its largest token id."""
    for location, token_id in largest:
        if token_id >= vocab_size:
            raise DataError(
                f"{setting}: {location} has the token {token_id}, and the model knows tokens below {vocab_size} "
                "(vocab_size of config.json); its tokenizer is that of another model"
            )


def named_rows(locations: Sequence[str]) -> str:
    """Return the first rows of a list, for a message, and how many more there are."""
    more = len(locations) - MOST_ROWS_NAMED
    return "; ".join(locations[:MOST_ROWS_NAMED]) + (f"; and {more} more" if more > 0 else "")


def prompt_ids(prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a prompt of any length, generation prompt included, or raise a DataError."""

    def render(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        goes_on = messages[-1]["role"] == "assistant"
        return tokenizer.apply_chat_template(
            as_parts(messages) if prompt.images else messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tokenize=True,
            return_dict=False,
            **variables,
        )

    is_plain = prompt.is_plain or not tokenizer.chat_template
    if is_plain and prompt.images:
        raise DataError(
            f"{prompt.location}: a row with images needs the model's chat template; use a model that has one"
        )
    if is_plain:
        token_ids = open_text_ids("\n".join(message["content"] for message in prompt.messages), tokenizer)
    else:
        try:
            token_ids = render(prompt.messages, template_kwargs)
        except Exception as error:  # templates raise jinja2 errors of their own making
            if (culprit := _culprit(prompt, render, template_kwargs)) is not None:
                raise DataError(f"{culprit} (at {prompt.location}: {template_problem(error)})") from error
            with row_errors(prompt.location, template_kwargs):
                raise
    if not token_ids:
        raise DataError(f"{prompt.location}: the prompt has no tokens")
    return token_ids


def _culprit(prompt: Prompt, render: Callable[..., Any], template_kwargs: Mapping[str, Any]) -> str | None:
    """Return what makes the chat template refuse a row, if not the row: what it can be rendered without."""
    messages, system = prompt.messages, prompt.messages[0]["content"]
    if prompt.has_added_system and _renders(render, messages[1:], template_kwargs):
        return (
            f"data.system_prompt={system[:MOST_SHOWN]!r}: the model's chat template takes no system "
            "message; set it to null, and put the text into the prompts (data.prompt_template)"
        )
    if template_kwargs and _renders(render, messages, {}):
        return (
            f"{KWARGS_KEY}={redact(template_kwargs)}: the model's chat template fails with these variables; mend them"
        )
    if not _renders(render, [{"role": "user", "content": "Hello"}], {}):
        return "the model's chat template cannot render a message of the user; mend it, or use another model"
    return None


def _renders(render: Callable[..., Any], messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> bool:
    try:
        render(messages, variables)
    except Exception:  # noqa: BLE001 - whatever the template raises
        return False
    return True


def _truncate(token_ids: list[int], limit: int, truncation: str, location: str) -> list[int]:
    if truncation == "left":
        return token_ids[-limit:]
    if truncation == "right":
        return token_ids[:limit]
    if truncation == "middle":
        head = limit // 2
        return token_ids[:head] + token_ids[head - limit :]
    if truncation != "error":
        raise DataError(f"data.truncation={truncation}: must be error, left, right or middle")
    raise DataError(
        f"data.max_prompt_length={limit}: the prompt at {location} has {len(token_ids)} tokens; raise it, leave such "
        "rows out (data.filter_overlong_prompts=true), or cut them (data.truncation=left, right or middle)"
    )
