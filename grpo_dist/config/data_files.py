"""Parses the entries of `data.train_files` and `data.val_files`. The accepted forms:

    rows.parquet  rows.jsonl  rows.json       a file
    FOLDER  FOLDER:SPLIT                      parquet files, or what `datasets.save_to_disk` wrote
    hf:OWNER/NAME[/CONFIG][:SPLIT]            a data set of the Hugging Face hub
    builtin:arithmetic/SPLIT                  a built-in task

No file is read and `datasets` is not imported, so this is cheap enough to run before anything starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from grpo_dist.assets import BUILTIN, expanded, is_file, is_folder
from grpo_dist.config.keys import Problem, missing_path

HUB = "hf:"
SUFFIXES = (".parquet", ".jsonl", ".json")
FORMS = (
    "must end in .parquet, .jsonl or .json, be a folder (FOLDER or FOLDER:SPLIT), "
    f"{HUB}OWNER/NAME[/CONFIG][:SPLIT], or {BUILTIN}NAME"
)
NEEDS_DATASETS = "needs the datasets library: pip install 'datasets>=4,<6' (the extra datasets)"

_WITH_SPLIT = re.compile(r"(.+):([\w.-]+)")
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w.-]+))?")

Kind = Literal["builtin", "hub", "saved", "parquet_folder", "file"]


@dataclass(frozen=True)
class DataFile:
    """A parsed entry.

    Attributes:
        kind: type of the source; "saved" is a folder written by `datasets.save_to_disk`.
        path: file, folder, hub name (OWNER/NAME) or built-in task with its split.
        split: split of a hub data set or folder, if the entry names one.
    """

    kind: Kind
    path: str
    config: str | None = None
    split: str | None = None


def parse_data_file(key: str, name: str) -> DataFile | Problem:
    """Parse one entry of a key. Checks whether files and folders exist, but reads none."""

    def problem(why: str) -> Problem:
        return Problem(f"{key}={name}: {why}", (key,))

    def with_library(file: DataFile) -> DataFile | Problem:
        return problem(NEEDS_DATASETS) if find_spec("datasets") is None else file

    if name.startswith(BUILTIN):
        return DataFile("builtin", name.removeprefix(BUILTIN))
    if name.startswith(HUB):
        match = _HUB_NAME.fullmatch(name.removeprefix(HUB))
        if match is None:
            return problem(f"must be {HUB}OWNER/NAME, {HUB}OWNER/NAME/CONFIG, either with :SPLIT")
        return with_library(DataFile("hub", *match.groups()))
    path, split = expanded(name), None
    named = _WITH_SPLIT.fullmatch(name)
    if not (is_file(path) or is_folder(path)) and named is not None and path.suffix not in SUFFIXES:
        path, split = expanded(named[1]), named[2]
    if is_folder(path):
        if is_file(path / "dataset_dict.json") or is_file(path / "state.json"):
            return with_library(DataFile("saved", str(path), split=split))
        if any(path.glob("*.parquet")):
            return DataFile("parquet_folder", str(path), split=split)
        return problem("is a folder with no .parquet files, and was not written by datasets.save_to_disk")
    if split is None and path.suffix in SUFFIXES:
        return DataFile("file", str(path)) if is_file(path) else missing_path(key, name, "file")
    return problem(FORMS) if path.suffix else missing_path(key, name, "folder")
