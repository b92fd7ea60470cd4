"""Rows of data files, folders, hub data sets and built-in tasks, each with its file and row for messages.

Single files are read here and not by the `datasets` library. Its JSON reader changes values (the text "2020-01-01"
becomes a date, tried with datasets 5.2), and its errors name neither the file nor the row in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_dist.assets import BUILTIN
from grpo_dist.config.data_files import HUB, DataFile, parse_data_file
from grpo_dist.config.keys import Problem
from grpo_dist.errors import DataError
from grpo_dist.plugins.registry import load_attribute

# builtin:NAME/SPLIT: the splits of a task, and the function that makes the rows of one.
BUILTIN_ROWS = {
    "arithmetic": (("train", "validation"), "grpo_dist.tasks.arithmetic:rows"),
    "arithmetic_pairs": (("train", "validation"), "grpo_dist.tasks.arithmetic:pairs"),
    "arithmetic_outcomes": (("train", "validation"), "grpo_dist.tasks.arithmetic:outcomes"),
    "arithmetic_steps": (("train", "validation"), "grpo_dist.tasks.arithmetic:steps"),
    "arithmetic_answers": (("train", "validation"), "grpo_dist.tasks.arithmetic:answers"),
    "squares": (("train", "validation"), "grpo_dist.tasks.squares:rows"),
}
# In train-00000-of-00002, part-00000-UUID.snappy or 0000 the shard's number and what follows do not name the split.
_SHARD = re.compile(r"[-_.]?\d{4,}.*")

# A JSON escape for one half of a surrogate pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Located = Iterator[tuple[str, Any]]
Split = TypeVar("Split")


def read_rows(files: Sequence[str], *, key: str) -> list[dict[str, Any]]:
    """Return all rows of all files (config/data_files.py), in order, as plain Python dicts, not yet checked.

    Raises:
        DataError: a file is missing, empty, of another kind, or cannot be parsed.
    """
    return [row for _, row in locate_rows(files, key=key)]


def locate_rows(files: Sequence[str], *, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what `read_rows` returns as (location, row); the location is "FILE, row 3" or "FILE, line 3"."""
    if isinstance(files, str):
        files = [files]
    if not files:
        raise DataError(f"{key}=[]: no files; name at least one .parquet, .jsonl or .json file")
    for file in files:
        empty = True
        for location, row in _read(file, key):
            empty = False
            if not isinstance(row, dict):
                raise DataError(f"{key}: {location}: expected an object with columns, got {shown(row)}")
            yield location, row
        if empty:
            raise DataError(f"{key}={file}: the file holds no rows")


def source_name(location: str) -> str:
    """Return the name of a row's data set: its file's, without the number of a shard, or its name on the hub."""
    entry = location.rpartition(", ")[0]
    if entry.startswith((HUB, BUILTIN)):
        return entry.partition(":")[2].partition(":")[0]
    path = Path(entry)
    return _SHARD.sub("", path.stem) or path.parent.name or entry


def _read(file: str, key: str) -> Located:
    parsed = parse_data_file(key, file)
    if isinstance(parsed, Problem):
        raise DataError(parsed.text)
    where = f"{key}={file}"
    try:
        if parsed.kind == "file":
            readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
            yield from readers[Path(parsed.path).suffix](Path(parsed.path), file, key)
        elif parsed.kind == "parquet_folder":
            for path in _shards(Path(parsed.path), parsed.split, where):
                yield from _read_parquet(path, str(path), key)
        elif parsed.kind == "builtin":
            yield from _numbered(file, "row", _builtin_rows(parsed.path, where))
        else:
            yield from _numbered(file, "row", _load_dataset(parsed, where))
    except OSError as error:
        raise DataError(f"{where}: cannot read the file: {error}") from error


def _numbered(file: str, unit: str, rows: Any) -> Located:
    for number, row in enumerate(rows, 1):
        yield f"{file}, {unit} {number}", row


def _builtin_rows(name: str, where: str) -> list[dict[str, Any]]:
    task, _, split = name.partition("/")
    splits, rows = BUILTIN_ROWS.get(task, ((), ""))
    if split not in splits:
        known = [f"{BUILTIN}{task}/{split}" for task, (splits, _) in BUILTIN_ROWS.items() for split in splits]
        raise DataError(f"{where}: no such built-in data set. Known: {', '.join(known)}")
    return load_attribute(rows, key=where)(split)


def _load_dataset(file: DataFile, where: str) -> Any:
    """Return the `datasets.Dataset` that a folder or the hub holds; no code that may come with it is run."""
    import datasets

    try:
        if file.kind == "saved":
            loaded = datasets.load_from_disk(file.path)
        else:
            loaded = datasets.load_dataset(file.path, file.config)
    except Exception as error:  # the library raises errors of many kinds
        raise DataError(f"{where}: cannot load: {type(error).__name__}: {_first_line(error)}") from error
    if isinstance(loaded, dict):
        return _choose_split(loaded, file.split, where)
    if file.split is not None:
        raise DataError(f"{where}: the folder holds one data set without splits; leave out :{file.split}")
    return loaded


def _shards(folder: Path, split: str | None, where: str) -> list[Path]:
    """Return the parquet files of a split: SPLIT.parquet, or SPLIT-00000-of-00002.parquet and so on."""
    by_split: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.parquet")):
        by_split.setdefault(_SHARD.sub("", path.stem), []).append(path)
    return _choose_split(by_split, split, where)


def _choose_split(splits: Mapping[str, Split], split: str | None, where: str) -> Split:
    """Return the split that is asked for, or the only one: several are never joined without a word."""
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split is not None and split in splits:
        return splits[split]
    problem = "has several splits, name one" if split is None else f"has no split {split!r}"
    known = ", ".join(f":{name}" for name in sorted(splits))
    raise DataError(f"{where}: {problem}; at the end of the name, one of {known}")


def _read_parquet(path: Path, file: str, key: str) -> Located:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            names = parquet.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):  # a dict would keep the last
                named = ", ".join(map(repr, twice))
                raise DataError(f"{key}={file}: several columns are called {named}; leave one of each")
            for batch in parquet.iter_batches():
                for row in _plain_rows(batch):
                    number += 1
                    yield f"{file}, row {number}", row
    # Bytes that are not what the file says they are: text that is not UTF-8, dates beyond Python's calendar, sizes that
    # no memory holds.
    except (pyarrow.ArrowException, ValueError, OverflowError, MemoryError) as error:
        after = f" (after row {number})" if number else ""
        raise DataError(f"{key}={file}: not a readable parquet file{after}: {_first_line(error)}") from error


def _plain_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows as Python values; arrays become lists. Rows before one without such a value come first."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        rows = (row for i in range(batch.num_rows) for row in batch.slice(i, 1).to_pylist())
    yield from rows


def _read_jsonl(path: Path, file: str, key: str) -> Located:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                location = f"{file}, line {number}"
                yield location, _parse_json(line, f"{key}: {location}")


def _read_json(path: Path, file: str, key: str) -> Located:
    rows = _parse_json(path.read_bytes(), f"{key}: {file}", hint="; one object per line is called .jsonl")
    if not isinstance(rows, list):
        raise DataError(f"{key}: {file}: expected a list of objects, got {shown(rows)}")
    yield from _numbered(file, "row", rows)


def _parse_json(raw: bytes, where: str, hint: str = "") -> Any:
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
        if _SURROGATE.search(raw):  # half a character: it can be read, but neither tokenized nor written down
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, a number of too many digits
        raise DataError(f"{where}: not valid JSON: {_first_line(error)}{hint}") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object; of a name that it has twice, JSON's own reader would keep the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)[:80]!r} stands there twice")
    return made


def shown(value: Any) -> str:
    """Return a value as messages show it: its type and the beginning of its repr."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:300]
