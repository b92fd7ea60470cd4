"""Prompts in verl's schema, from parquet, jsonl and json files and from built-in tasks.

One row: `data_source` (str), `prompt` (list of chat messages, or a plain string: one user message),
`ability` (not used), `reward_model` = {"ground_truth": ...}, `extra_info` (dict, optional). Every row is
checked when it is read, so that a broken row is named by file and row before anything expensive starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.errors import DataError

BUILTIN = "builtin:"
ARITHMETIC_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Prompt:
    """One checked row.

    Attributes:
        index: position among all rows of the files, from 0, whatever `max_samples` and shuffling choose.
        data_source: name of the data set; picks the built-in scorer and groups validation metrics.
        messages: chat messages, each with "role" and "content" (str).
        ground_truth: what the scorer compares with, as it stands in the file.
        extra_info: anything else for the scorer; {} where the row has none.
        location: file and row, for messages, such as "train.jsonl, line 3".
    """

    index: int
    data_source: str
    messages: list[dict[str, Any]]
    ground_truth: Any
    extra_info: dict[str, Any]
    location: str


def read_rows(files: Sequence[str], *, key: str) -> list[dict[str, Any]]:
    """All rows of all files, in order, as plain Python dicts, not yet checked against the schema.

    Args:
        files: paths ending in .parquet, .jsonl or .json (a list of objects), or `builtin:arithmetic/SPLIT`.
        key: the config key that names the files, for messages.

    Raises:
        DataError: a file is missing, empty, of another kind, or cannot be parsed.
    """
    return [row for _, row in locate_rows(files, key=key)]


def load_prompts(
    files: Sequence[str],
    *,
    key: str,
    prompt_key: str,
    reward_fn_key: str,
    max_samples: int,
    shuffle_seed: int | None,
) -> list[Prompt]:
    """Read and check all rows, then choose `max_samples` of them.

    Args:
        files: as in `read_rows`.
        key: the config key that names the files, for messages.
        prompt_key: column of the prompt.
        reward_fn_key: column of the data source.
        max_samples: how many rows to keep; -1, or more than there are: all.
        shuffle_seed: keep a random subset drawn with this seed; None: keep the first rows. The kept rows stay
            in file order either way.

    Raises:
        DataError: a file cannot be read, or a row breaks the schema (the message names file and row).
    """
    located = locate_rows(files, key=key)
    prompts = [
        _checked_prompt(row, index, location, key=key, prompt_key=prompt_key, reward_fn_key=reward_fn_key)
        for index, (location, row) in enumerate(located)
    ]
    if max_samples < 0 or max_samples >= len(prompts):
        return prompts
    if shuffle_seed is None:
        return prompts[:max_samples]
    chosen = np.random.default_rng(shuffle_seed).choice(len(prompts), size=max_samples, replace=False)
    return [prompts[i] for i in sorted(chosen)]


def locate_rows(files: Sequence[str], *, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Like `read_rows`, one (location, row) at a time; the location is "FILE, row 3" or "FILE, line 3"."""
    if isinstance(files, str):
        files = [files]
    if not files:
        raise DataError(f"{key}=[]: no files; name at least one .parquet, .jsonl or .json file")
    for file in files:
        empty = True
        for unit, number, row in _read_file(file, key):
            empty = False
            location = f"{file}, {unit} {number}"
            if not isinstance(row, dict):
                raise DataError(f"{key}: {location}: expected an object with columns, got {_show(row)}")
            yield location, row
        if empty:
            raise DataError(f"{key}={file}: the file holds no rows")


def _read_file(file: str, key: str) -> Iterator[tuple[str, int, Any]]:
    """Yield (unit of counting, 1-based number, row)."""
    if file.startswith(BUILTIN):
        for number, row in enumerate(_builtin_rows(file, key), 1):
            yield "row", number, row
        return
    path = Path(file).expanduser()
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix not in readers:
        raise DataError(f"{key}={file}: unknown kind of file; it must end in .parquet, .jsonl or .json")
    if not path.is_file():
        problem = "is a folder, name the file in it" if path.is_dir() else f"no such file (looked in {Path.cwd()})"
        raise DataError(f"{key}={file}: {problem}")
    try:
        yield from readers[path.suffix](path, file, key)
    except OSError as error:
        raise DataError(f"{key}={file}: cannot read the file: {error}") from error


def _builtin_rows(name: str, key: str) -> list[dict[str, Any]]:
    task, _, split = name.removeprefix(BUILTIN).partition("/")
    if task != "arithmetic" or split not in ARITHMETIC_SPLITS:
        known = ", ".join(f"{BUILTIN}arithmetic/{split}" for split in ARITHMETIC_SPLITS)
        raise DataError(f"{key}={name}: no such built-in data set. Known: {known}")
    import grpo_dist.data.arithmetic as arithmetic

    return arithmetic.rows(split)


def _read_parquet(path: Path, file: str, key: str) -> Iterator[tuple[str, int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            number = 0
            for batch in parquet.iter_batches():
                for row in batch.to_pylist():  # nested arrays become Python lists and dicts
                    number += 1
                    yield "row", number, row
    except pyarrow.ArrowException as error:
        raise DataError(f"{key}={file}: not a readable parquet file: {_first_line(error)}") from error


def _read_jsonl(path: Path, file: str, key: str) -> Iterator[tuple[str, int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield "line", number, _parse_json(line, f"{key}: {file}, line {number}")


def _read_json(path: Path, file: str, key: str) -> Iterator[tuple[str, int, Any]]:
    rows = _parse_json(path.read_bytes(), f"{key}: {file}", hint="; one object per line is called .jsonl")
    if not isinstance(rows, list):
        raise DataError(f"{key}: {file}: expected a list of objects, got {_show(rows)}")
    for number, row in enumerate(rows, 1):
        yield "row", number, row


def _parse_json(raw: bytes, where: str, hint: str = "") -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {_first_line(error)}{hint}") from error


def _checked_prompt(
    row: dict[str, Any], index: int, location: str, *, key: str, prompt_key: str, reward_fn_key: str
) -> Prompt:
    where = f"{key}: {location}"
    data_source = _column(row, reward_fn_key, where, setting=f" (data.reward_fn_key={reward_fn_key})")
    if not isinstance(data_source, str) or not data_source:
        raise DataError(f"{where}: {reward_fn_key} must be a non-empty string, got {_show(data_source)}")
    reward_model = _column(row, "reward_model", where)
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise DataError(f"{where}: reward_model must be {{'ground_truth': ...}}, got {_show(reward_model)}")
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise DataError(f"{where}: extra_info must be an object, got {_show(extra_info)}")
    column = _column(row, prompt_key, where, setting=f" (data.prompt_key={prompt_key})")
    messages = _checked_messages(column, f"{where}: {prompt_key}")
    return Prompt(index, data_source, messages, reward_model["ground_truth"], extra_info or {}, location)


def _checked_messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where} must be a non-empty list of messages, or a string, got {_show(prompt)}")
    messages = []
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} must have a role, got {_show(message)}")
        content = message.get("content")
        if not isinstance(content, str):
            raise DataError(f"{where}: the content of message {number} must be text, got {_show(content)}")
        # Parquet gives every message the union of all fields: null stands for "not there".
        messages.append({name: value for name, value in message.items() if value is not None})
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{where} is empty")
    return messages


def _column(row: dict[str, Any], name: str, where: str, *, setting: str = "") -> Any:
    if row.get(name) is None:
        columns = ", ".join(map(str, row)) or "nothing"
        raise DataError(f"{where}: no column {name!r}{setting}; the row has {columns}")
    return row[name]


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
