"""Prompts in verl's schema, or in another one (columns.py).

One row: `data_source` (str), `prompt` (list of chat messages, or a plain string: one user message),
`reward_model` = {"ground_truth": ...}, `extra_info` (dict, optional), and any others. Every row is
checked when it is read, so that a broken row is named by file and row before anything expensive starts. Where a model
scores, `data_source` and `reward_model` may be missing, as in TRL's tldr rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grpo_dist.data.columns import MESSAGES, Columns, check_text_only, unread
from grpo_dist.data.files import locate_rows, shown
from grpo_dist.errors import DataError

# Data source of rows without one, where a model scores.
NO_DATA_SOURCE = "data"
# A text that is no prompt, but what JSON makes of one.
_MESSAGES_AS_JSON = re.compile(r'\s*\[\s*\{\s*"(role|content)"\s*:')


@dataclass(frozen=True)
class Prompt:
    """One checked row.

    Attributes:
        index: position among all rows of the files, from 0, whatever `max_samples` and shuffling choose.
        data_source: name of the data set; picks the built-in scorer and groups validation metrics.
        messages: chat messages, each with "role" and "content" (str).
        ground_truth: what the scorer compares with, as it stands in the file; None where a row has none and needs none.
        extra_info: anything else for the scorer; {} where the row has none.
        location: file and row, for messages, such as "train.jsonl, line 3".
        columns: the row's other columns, as far as the reward function takes them.
        is_text: whether the row's prompt is a text, which became one message of the user.
        taken: what was found without being named, as config keys and the values that say the same.
        unread: what the row has that would change what the policy is asked, and is not read; see `columns.UNREAD`.
        is_plain: whether it is asked as it stands, without the chat template.
        has_added_system: whether the first message is one that `add_system_prompt` has put there.
    """

    index: int
    data_source: str
    messages: list[dict[str, Any]]
    ground_truth: Any
    extra_info: dict[str, Any]
    location: str
    columns: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False
    taken: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[str] = ()
    is_plain: bool = False
    has_added_system: bool = False


def load_prompts(
    files: Sequence[str],
    *,
    key: str,
    max_samples: int,
    shuffle_seed: int | None,
    **columns: Any,
) -> list[Prompt]:
    """Read and check all rows, then choose `max_samples` of them.

    Args:
        files: entries in the forms of config/data_files.py.
        key: the config key that names the files, for messages.
        max_samples: how many rows to keep; -1, or more than there are: all.
        shuffle_seed: keep a random subset drawn with this seed; None: keep the first rows. The kept rows stay
            in file order either way.
        **columns: the fields of `columns.Columns`, such as prompt_key.

    Raises:
        DataError: a file cannot be read, or a row breaks the schema (the message names file and row).
    """
    read = Columns(**columns)
    located = locate_rows(files, key=key)
    prompts = [checked_prompt(row, index, location, key, read) for index, (location, row) in enumerate(located)]
    if max_samples < 0 or max_samples >= len(prompts):
        return prompts
    if shuffle_seed is None:
        return prompts[:max_samples]
    chosen = np.random.default_rng(shuffle_seed).choice(len(prompts), size=max_samples, replace=False)
    return [prompts[i] for i in sorted(chosen)]


def add_system_prompt(prompts: Sequence[Prompt], text: str) -> tuple[list[Prompt], int]:
    """Put a system message before the prompts that have none.

    Returns:
        The prompts, in order, and how many have a system message of their own, which they keep.
    """
    message, num_kept, changed = {"role": "system", "content": text}, 0, []
    for prompt in prompts:
        if any(turn["role"] == "system" for turn in prompt.messages):
            num_kept += 1
            changed.append(prompt)
        else:
            changed.append(replace(prompt, messages=[dict(message), *prompt.messages], has_added_system=True))
    return changed, num_kept


def checked_prompt(row: dict[str, Any], index: int, location: str, key: str, columns: Columns) -> Prompt:
    """Check one row.

    Args:
        key: the config key that names the files, for messages.
    """
    where, taken = f"{key}: {location}", dict[str, str]()
    check_text_only(row, where, columns.kept or ())
    data_source = columns.source(row, location, where, taken)
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise DataError(f"{where}: extra_info must be an object, got {shown(extra_info)}")
    name, value = columns.prompt(row, where, taken)
    messages, turn = checked_messages(value, f"{where}: {name}"), None
    if name == MESSAGES and messages[-1]["role"] == "assistant":  # the answer, which the policy is to find
        turn = messages.pop()["content"]
        if not messages:
            raise DataError(f"{where}: {name} has nothing but an answer of the assistant; put the question before it")
    if messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):  # other begun turns are gone on from
        raise DataError(
            f"{where}: {name} ends in a call of a tool; put the tool's answer behind it, or leave out the call"
        )
    truth_name, truth = columns.answer(row, turn, where, taken)
    if isinstance(truth, float) and not math.isfinite(truth):  # a table's "nothing is there", which nothing equals
        raise DataError(f"{where}: {truth_name} is {truth}; write a finite number, or text, or drop the row")
    others = columns.others(row, extra_info or {}, where)
    is_text = isinstance(value, str)
    return Prompt(index, data_source, messages, truth, extra_info or {}, location, others, is_text, taken, unread(row))


def checked_messages(value: Any, where: str, role: str = "user") -> list[dict[str, Any]]:
    """Return chat messages; a text becomes one message of `role`.

    Raises:
        DataError: they are not; the message begins with `where`.
    """
    if isinstance(value, str):
        if _MESSAGES_AS_JSON.match(value):
            raise DataError(f"{where} is the JSON text of a list of messages; write the list itself: {shown(value)}")
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be a non-empty list of messages, or a string, got {shown(value)}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} must have a role, got {shown(message)}")
        content = _text_of(message.get("content"))
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise DataError(f"{where}: the content of message {number} must be text, got {shown(content)}")
        messages.append(_without_nulls(message) | {"content": content})
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise DataError(f"{where} is empty")
    return messages


def _without_nulls(value: Any) -> Any:
    """Return a message, or a part of one, without the fields that are null, at any depth.

    Parquet and `datasets` give every object of a column the union of all fields, such as the arguments of all tools:
    null stands for "not there". Nulls among the entries of a list say something, and stay.
    """
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return value


def _text_of(content: Any) -> Any:
    """Return the content of a message; parts of text, OpenAI's form, become one text, a line or more for each part."""
    parts = content if isinstance(content, list) else []
    of_text = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in of_text if isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts and len(texts) == len(parts) else content
