"""Write data sets as parquet files in verl's schema.

python -m grpo_dist.data.prepare gsm8k --local_save_dir data/gsm8k [--local_dataset_path FOLDER]
python -m grpo_dist.data.prepare arithmetic --local_save_dir data/arithmetic
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.data.prompts import locate_rows
from grpo_dist.errors import DataError, GrpoDistError

GSM8K = "openai/gsm8k"
# verl's wording, so that results can be compared with its published ones.
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

Row = dict[str, Any]


def gsm8k_row(example: Row, *, split: str, index: int, location: str) -> Row:
    """One GSM8K example in verl's schema.

    Args:
        example: "question" and "answer" (the solution, which ends in `#### NUMBER`), both text.
        split: "train" or "test".
        index: position in the split, from 0.
        location: file and row, for messages.

    Raises:
        DataError: a field is missing, or the answer has no `#### NUMBER`.
    """
    for name in ("question", "answer"):
        if not isinstance(example.get(name), str) or not example[name].strip():
            raise DataError(f"{location}: needs a non-empty text field {name!r}; it has {', '.join(example)}")
    question, answer = example["question"], example["answer"]
    found = re.search(r"#### (-?[0-9.,]+)", answer)
    if found is None:
        raise DataError(f"{location}: the answer has no '#### NUMBER': ...{answer[-80:]!r}")
    return {
        "data_source": GSM8K,
        "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def prepare_gsm8k(local_save_dir: str, *, local_dataset_path: str | None) -> dict[str, int]:
    """Write train.parquet and test.parquet; both splits are read and checked before anything is written.

    Args:
        local_save_dir: where to; made if it is not there.
        local_dataset_path: folder with train.jsonl and test.jsonl of the original release. None: the Hugging
            Face hub, through the `datasets` library.

    Returns:
        Rows by file written.
    """
    splits = {}
    for split in ("train", "test"):
        examples = _hub_examples(split) if local_dataset_path is None else _local_examples(local_dataset_path, split)
        splits[split] = [
            gsm8k_row(example, split=split, index=index, location=location)
            for index, (location, example) in enumerate(examples)
        ]
    return _write_splits(splits, local_save_dir)


def prepare_arithmetic(local_save_dir: str) -> dict[str, int]:
    """Write the built-in task as train.parquet and validation.parquet. Returns rows by file written."""
    import grpo_dist.data.arithmetic as arithmetic

    return _write_splits({split: arithmetic.rows(split) for split in ("train", "validation")}, local_save_dir)


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


def _write_splits(splits: dict[str, list[Row]], local_save_dir: str) -> dict[str, int]:
    folder = Path(local_save_dir).expanduser()
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


def _local_examples(folder: str, split: str) -> Iterator[tuple[str, Row]]:
    return locate_rows([str(Path(folder).expanduser() / f"{split}.jsonl")], key="--local_dataset_path")


def _hub_examples(split: str) -> Iterable[tuple[str, Row]]:
    advice = f"download train.jsonl and test.jsonl of {GSM8K} and give their folder as --local_dataset_path"
    try:
        import datasets
    except ImportError:
        raise DataError(f"the hub needs the datasets library: pip install datasets, or {advice}") from None
    try:
        examples = datasets.load_dataset(GSM8K, "main", split=split)
    except Exception as error:
        raise DataError(f"cannot load {GSM8K} from the hub ({type(error).__name__}: {error}); {advice}") from error
    return [(f"{GSM8K} {split}, row {number}", dict(example)) for number, example in enumerate(examples, 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, or 2 for something the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m grpo_dist.data.prepare", description="Data sets as parquet.")
    tasks = parser.add_subparsers(dest="task", required=True)
    gsm8k = tasks.add_parser("gsm8k", help="grade school mathematics: 7,473 training and 1,319 test questions")
    gsm8k.add_argument("--local_dataset_path", help="folder with train.jsonl and test.jsonl; default: the hub")
    arithmetic = tasks.add_parser("arithmetic", help="the built-in task")
    for task in (gsm8k, arithmetic):
        task.add_argument("--local_save_dir", required=True, help="folder to write to")
    options = parser.parse_args(arguments)
    try:
        if options.task == "gsm8k":
            written = prepare_gsm8k(options.local_save_dir, local_dataset_path=options.local_dataset_path)
        else:
            written = prepare_arithmetic(options.local_save_dir)
    except GrpoDistError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    for path, num_rows in written.items():
        sys.stdout.write(f"{path}: {num_rows:,} rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
