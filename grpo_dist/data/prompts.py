"""Prompts in verl's schema.

One row: `data_source` (str), `prompt` (list of chat messages, or a plain string: one user message),
`ability` (not used), `reward_model` = {"ground_truth": ...}, `extra_info` (dict, optional). Every row is
checked when it is read, so that a broken row is named by file and row before anything expensive starts. Where a model
scores, `data_source` and `reward_model` may be missing, as in TRL's tldr rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_dist.data.files import locate_rows, shown
from grpo_dist.errors import DataError

# Data source of rows without one.
NO_DATA_SOURCE = "data"
MOST_COLUMN_TEXT = 300  # characters of a row's column names, in messages


@dataclass(frozen=True)
class Prompt:
    """One checked row.

    Attributes:
        index: position among all rows of the files, from 0, whatever `max_samples` and shuffling choose.
        data_source: name of the data set; picks the built-in scorer and groups validation metrics.
        messages: chat messages, each with "role" and "content" (str).
        ground_truth: what the scorer compares with, as it stands in the file; None where a model scores a row without.
        extra_info: anything else for the scorer; {} where the row has none.
        location: file and row, for messages, such as "train.jsonl, line 3".
    """

    index: int
    data_source: str
    messages: list[dict[str, Any]]
    ground_truth: Any
    extra_info: dict[str, Any]
    location: str


def load_prompts(
    files: Sequence[str],
    *,
    key: str,
    prompt_key: str,
    reward_fn_key: str,
    max_samples: int,
    shuffle_seed: int | None,
    needs_ground_truth: bool = True,
) -> list[Prompt]:
    """Read and check all rows, then choose `max_samples` of them.

    Args:
        files: entries in the forms of config/data_files.py.
        key: the config key that names the files, for messages.
        prompt_key: column of the prompt.
        reward_fn_key: column of the data source.
        max_samples: how many rows to keep; -1, or more than there are: all.
        shuffle_seed: keep a random subset drawn with this seed; None: keep the first rows. The kept rows stay
            in file order either way.
        needs_ground_truth: whether a row must have a ground truth and a data source: not where a model scores.

    Raises:
        DataError: a file cannot be read, or a row breaks the schema (the message names file and row).
    """
    located = locate_rows(files, key=key)
    prompts = [
        checked_prompt(
            row,
            index,
            location,
            key=key,
            prompt_key=prompt_key,
            reward_fn_key=reward_fn_key,
            needs_ground_truth=needs_ground_truth,
        )
        for index, (location, row) in enumerate(located)
    ]
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
        if any(each["role"] == "system" for each in prompt.messages):
            num_kept += 1
            changed.append(prompt)
        else:
            changed.append(replace(prompt, messages=[dict(message), *prompt.messages]))
    return changed, num_kept


def checked_prompt(
    row: dict[str, Any],
    index: int,
    location: str,
    *,
    key: str,
    prompt_key: str,
    reward_fn_key: str,
    needs_ground_truth: bool = True,
) -> Prompt:
    """Check one row.

    Args:
        row: the row.
        index: its position among all rows.
        location: file and row.
        key: the config key that names the files, for messages.
        prompt_key: column of the prompt.
        reward_fn_key: column of the data source.
        needs_ground_truth: see `load_prompts`.

    Raises:
        DataError: it breaks the schema; the message names file, row and column.
    """
    where = f"{key}: {location}"
    if not needs_ground_truth and reward_fn_key == "data_source":  # a name that somebody chose is there
        row = {reward_fn_key: NO_DATA_SOURCE, **{name: value for name, value in row.items() if value is not None}}
    data_source = column_of(row, reward_fn_key, where, setting=f" (data.reward_fn_key={reward_fn_key})")
    if not isinstance(data_source, str) or not data_source:
        raise DataError(f"{where}: {reward_fn_key} must be a non-empty string, got {shown(data_source)}")
    reward_model = row.get("reward_model", {}) if not needs_ground_truth else column_of(row, "reward_model", where)
    if not isinstance(reward_model, dict) or (needs_ground_truth and reward_model.get("ground_truth") is None):
        raise DataError(f"{where}: reward_model must be {{'ground_truth': ...}}, got {shown(reward_model)}")
    ground_truth = reward_model.get("ground_truth")
    _check_ground_truth(ground_truth, where)
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise DataError(f"{where}: extra_info must be an object, got {shown(extra_info)}")
    column = column_of(row, prompt_key, where, setting=f" (data.prompt_key={prompt_key})")
    messages = checked_messages(column, f"{where}: {prompt_key}")
    return Prompt(index, data_source, messages, ground_truth, extra_info or {}, location)


def _check_ground_truth(value: Any, where: str) -> None:
    """A nan is how a table says that nothing is there, and nothing equals it: no response could be right."""
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(
            f"{where}: reward_model.ground_truth is {value}; write a finite number, or text, or drop the row"
        )


def checked_messages(value: Any, where: str, role: str = "user") -> list[dict[str, Any]]:
    """Chat messages; a text becomes one message of `role`.

    Raises:
        DataError: they are not; the message begins with `where`.
    """
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be a non-empty list of messages, or a string, got {shown(value)}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} must have a role, got {shown(message)}")
        content = message.get("content")
        if not isinstance(content, str):
            raise DataError(f"{where}: the content of message {number} must be text, got {shown(content)}")
        # Parquet gives every message the union of all fields: null stands for "not there".
        messages.append({name: value for name, value in message.items() if value is not None})
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{where} is empty")
    return messages


def column_of(row: dict[str, Any], name: str, where: str, *, setting: str = "") -> Any:
    """The value of a row's column.

    Args:
        row: the row.
        name: of the column.
        where: file and row, for the message.
        setting: the setting that chose the name, if one did.

    Raises:
        DataError: the row has no such column, or nothing in it.
    """
    if row.get(name) is None:
        columns = ", ".join(map(str, row))[:MOST_COLUMN_TEXT] or "nothing"
        raise DataError(f"{where}: no column {name!r}{setting}; the row has {columns}")
    return row[name]
