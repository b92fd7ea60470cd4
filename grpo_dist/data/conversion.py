"""Data sets of other schemas to parquet files in verl's: their examples are read, made into rows, and written.

Examples come from a local folder or from the Hugging Face hub. The tasks in grpo_dist/tasks/ say how a row is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.assets import expanded
from grpo_dist.data.files import locate_rows
from grpo_dist.errors import DataError, in_a_line

LOCAL_KEY = "--local_dataset_path"
KINDS = ("jsonl", "json", "parquet")

Row = dict[str, Any]
Written = dict[str, int]  # rows by file


def convert(
    make_row: Callable[..., Row], local_save_dir: str, *, local_dataset_path: str | None, hub: tuple[str, str]
) -> Written:
    """Write train.parquet and test.parquet of a data set; all examples are read and checked before anything is written.

    Args:
        make_row: makes a row of (example, split=, index=, location=); its errors name the location.
        local_dataset_path: a folder with the files of train and test; see `local_examples`. None: the hub.
        hub: the data set's name and configuration on the Hugging Face hub.

    Raises:
        DataError: an example is broken, or a file cannot be read or written.
    """

    def examples(split: str) -> Iterable[tuple[str, Row]]:
        return hub_examples(*hub, split) if local_dataset_path is None else local_examples(local_dataset_path, split)

    rows = {
        split: [
            make_row(example, split=split, index=index, location=location)
            for index, (location, example) in enumerate(examples(split))
        ]
        for split in ("train", "test")
    }
    return write_splits(rows, local_save_dir)


def local_examples(folder: str, split: str) -> Iterator[tuple[str, Row]]:
    """Return (location, example) of the files of a split in a folder, or in its folder `data`.

    They are called SPLIT.jsonl, .json or .parquet, or SPLIT-00000-of-00002.parquet as on the hub. Of several kinds the
    first one is read, in this order.
    """
    base = expanded(folder)
    for kind in KINDS:
        for place in (base, base / "data"):
            files = [place / f"{split}.{kind}"] if (place / f"{split}.{kind}").is_file() else []
            files = files or sorted(place.glob(f"{split}-*-of-*.{kind}"))
            if files:
                return locate_rows([str(file) for file in files], key=LOCAL_KEY)
    wanted = ", ".join(f"{split}.{kind}" for kind in KINDS)
    raise DataError(
        f"{LOCAL_KEY}={folder}: no such file: {wanted} or {split}-*-of-*.parquet, in it or in its folder data"
    )


def hub_examples(name: str, config: str, split: str) -> Iterable[tuple[str, Row]]:
    """Return (location, example) of a split of a data set of the Hugging Face hub, through the `datasets` library."""
    advice = f"download train and test of {name} (jsonl or parquet) and give their folder as {LOCAL_KEY}"
    try:
        import datasets
    except ImportError:
        raise DataError(f"the hub needs the datasets library: pip install datasets, or {advice}") from None
    try:
        examples = datasets.load_dataset(name, config, split=split)
    except Exception as error:
        told = f"cannot load {name} from the hub ({in_a_line(error)}); {advice}; HF_HUB_OFFLINE=1 spares retries"
        raise DataError(told) from error
    return [(f"{name} {split}, row {number}", dict(example)) for number, example in enumerate(examples, 1)]


def require_text(example: Row, names: Sequence[str], location: str) -> None:
    """Check that an example has these fields, as text that is not empty."""
    for name in names:
        if not isinstance(example.get(name), str) or not example[name].strip():
            raise DataError(f"{location}: needs a non-empty text field {name!r}; it has {', '.join(map(str, example))}")


def verl_row(
    data_source: str, prompt: str | list[dict[str, str]], ground_truth: Any, *, ability: str = "math", **extra_info: Any
) -> Row:
    """Return a row in verl's schema; a prompt that is text is a message of the user."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def check_sizes(**sizes: int) -> None:
    """Check numbers of rows, by the options that ask for them."""
    for name, size in sizes.items():
        if not 1 <= size <= 10**7:
            raise DataError(f"--{name}={size}: must be at least 1 and at most 10,000,000")


def write_splits(splits: Mapping[str, Sequence[Row]], local_save_dir: str) -> Written:
    """Write SPLIT.parquet for every split. Returns the number of rows by file written."""
    folder = expanded(local_save_dir)
    written = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            path = folder / f"{split}.parquet"
            write_parquet(rows, path)
            written[str(path)] = len(rows)
    except OSError as error:
        raise DataError(f"--local_save_dir={local_save_dir}: cannot write: {error}") from error
    return written


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write rows so that `path` either holds all of them or is as it was."""
    import pyarrow
    import pyarrow.parquet

    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
