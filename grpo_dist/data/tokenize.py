"""Prompts to token ids: chat template, length limit, truncation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import DataError
from grpo_dist.redact import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row", bound=Any)
Example = TypeVar("Example", bound=Any)

MOST_PROBLEM_TEXT = 500  # characters of what a chat template says
_KWARGS_KEY = "data.apply_chat_template_kwargs"
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
) -> tuple[list[TokenizedPrompt], list[Prompt]]:
    """Apply the chat template and the length limit.

    A prompt that ends in a turn of the assistant is not closed: the response goes on from that turn.

    A tokenizer without a chat template (a base model) gets the contents of the messages, in order, joined by
    newlines, with the special tokens it puts in front of any text (such as BOS); roles are left out and
    nothing marks the end of the prompt, so the response continues the last line.

    Args:
        prompts: checked rows.
        tokenizer: a transformers tokenizer.
        max_prompt_length: most tokens per prompt, template included.
        truncation: for overlong prompts that are not filtered: "error"; or the part that is cut: "left",
            "right", or "middle" (keeps the first max_prompt_length // 2 tokens, the rest from the end).
        filter_overlong_prompts: leave overlong prompts out.
        apply_chat_template_kwargs: extra variables for the chat template.

    Returns:
        The tokenized prompts, in order; and the overlong ones, which were left out, or else cut.

    Raises:
        DataError: the template refuses a row, a prompt is empty or (truncation "error") overlong, or no
            prompt is left.
    """
    encode = _encoder(tokenizer, apply_chat_template_kwargs)
    tokenized: list[TokenizedPrompt] = []
    overlong: list[Prompt] = []
    for prompt in prompts:
        token_ids = encode(prompt)
        if len(token_ids) > max_prompt_length:
            overlong.append(prompt)
            if filter_overlong_prompts:
                continue
            token_ids = _truncate(token_ids, max_prompt_length, truncation, prompt.location)
        tokenized.append(TokenizedPrompt(prompt, np.asarray(token_ids, dtype=np.int32)))
    if prompts and not tokenized:
        raise DataError(
            f"data.max_prompt_length={max_prompt_length}: all {len(overlong)} prompts are longer, none is "
            f"left (the first is {prompts[0].location}); raise it, or cut them: "
            f"data.filter_overlong_prompts=false data.truncation=left"
        )
    return tokenized, overlong


def check_token_ids(largest: Iterable[tuple[str, int]], vocab_size: int, *, setting: str) -> None:
    """Check that the model has an embedding for every token.

    Args:
        largest: of each row, where it is and its largest token id.
        vocab_size: of the model.
        setting: the key and value that name the model, for messages.

    Raises:
        DataError: a row has a token beyond them: the tokenizer is that of another model.
    """
    for location, token_id in largest:
        if token_id >= vocab_size:
            raise DataError(
                f"{setting}: {location} has the token {token_id}, and the model knows tokens below {vocab_size} "
                "(vocab_size of config.json); its tokenizer is that of another model"
            )


def named_rows(locations: Sequence[str]) -> str:
    """The first rows of a list, for a message, and how many more there are."""
    more = len(locations) - MOST_ROWS_NAMED
    return "; ".join(locations[:MOST_ROWS_NAMED]) + (f"; and {more} more" if more > 0 else "")


def check_template_kwargs(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
    """Check that there is a chat template, if there are variables for it.

    Raises:
        DataError: there is none.
    """
    if template_kwargs and not tokenizer.chat_template:
        raise DataError(
            f"{_KWARGS_KEY}={redact(template_kwargs)}: the tokenizer has no chat template to "
            f"give them to; leave it empty"
        )


def open_text_ids(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text that a base model goes on from: opened by its tokenizer, but not closed."""
    token_ids = list(tokenizer(text)["input_ids"])
    if token_ids and token_ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        token_ids.pop()  # some tokenizers close every text; a response would then start after the end
    return token_ids


def within_length(
    rows: Sequence[Row], tokenized: Callable[[Row], Example], *, max_length: int
) -> tuple[list[Example], list[Row]]:
    """Rows as examples for training, without those that are too long: a cut one would be another answer.

    Args:
        rows: with a `location`, for messages.
        tokenized: from a row to its example, which has `num_tokens`.
        max_length: most tokens of an example (data.max_length).

    Returns:
        The examples, in order, and the rows that were left out.

    Raises:
        DataError: all rows are too long.
    """
    examples: list[Example] = []
    left_out: list[Row] = []
    for row in rows:
        example = tokenized(row)
        if example.num_tokens > max_length:
            left_out.append(row)
        else:
            examples.append(example)
    if rows and not examples:
        raise DataError(
            f"data.max_length={max_length}: all {len(left_out)} rows have more tokens, none is left (the first is "
            f"{left_out[0].location}); raise it"
        )
    return examples, left_out


@contextmanager
def template_errors(location: str, template_kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn what a chat template raises in the block into an error that names the row.

    Args:
        location: file and row.
        template_kwargs: data.apply_chat_template_kwargs; None: the command has no such key.

    Raises:
        DataError: the template refuses the row.
    """
    try:
        yield
    except Exception as error:  # templates raise jinja2 errors of their own making
        variables = f" or {_KWARGS_KEY}={redact(template_kwargs)}" if template_kwargs else ""
        raise DataError(
            f"{location}: the model's chat template refuses the row: {_problem(error)}; mend the row's messages"
            f"{variables}"
        ) from error


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_PROBLEM_TEXT]


def _encoder(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Callable[[Prompt], list[int]]:
    """The function from a prompt to its token ids."""

    def render(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        goes_on = messages[-1]["role"] == "assistant"
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tokenize=True,
            return_dict=False,
            **variables,
        )

    def with_template(prompt: Prompt) -> list[int]:
        try:
            token_ids = render(prompt.messages, template_kwargs)
        except Exception as error:  # templates raise jinja2 errors of their own making
            if (culprit := _culprit(prompt, render, template_kwargs)) is not None:
                raise DataError(f"{culprit} (at {prompt.location}: {_problem(error)})") from error
            with template_errors(prompt.location, template_kwargs):
                raise
        return _not_empty(token_ids, prompt)

    def without_template(prompt: Prompt) -> list[int]:
        text = "\n".join(message["content"] for message in prompt.messages)
        return _not_empty(open_text_ids(text, tokenizer), prompt)

    check_template_kwargs(tokenizer, template_kwargs)
    return with_template if tokenizer.chat_template else without_template


def _culprit(prompt: Prompt, render: Callable[..., Any], template_kwargs: Mapping[str, Any]) -> str | None:
    """What makes the chat template refuse a row, if that is not the row: what it can be rendered without."""
    messages, system = prompt.messages, prompt.messages[0]["content"]
    if prompt.has_added_system and _renders(render, messages[1:], template_kwargs):
        return (
            f"data.system_prompt={system[:MOST_SHOWN]!r}: the model's chat template takes no system "
            "message; set it to null, and put the text into the prompts (data.prompt_template)"
        )
    if template_kwargs and _renders(render, messages, {}):
        return (
            f"{_KWARGS_KEY}={redact(template_kwargs)}: the model's chat template fails with these variables; mend them"
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


def _not_empty(token_ids: list[int], prompt: Prompt) -> list[int]:
    if not token_ids:
        raise DataError(f"{prompt.location}: the prompt has no tokens")
    return token_ids


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
        f"data.max_prompt_length={limit}: the prompt at {location} has {len(token_ids)} tokens; raise it, "
        f"leave such rows out (data.filter_overlong_prompts=true), or cut them (data.truncation=left, right "
        f"or middle)"
    )
