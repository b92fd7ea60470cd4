"""`grpo-dist data TASK`: writes the tasks' rows as parquet files in verl's schema (docs/rewards.md#data-for-them)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from grpo_dist.data.conversion import LOCAL_KEY, Written, convert, write_splits
from grpo_dist.errors import GrpoDistError
from grpo_dist.tasks import arithmetic, countdown, folders, gsm8k, reasoning_gym
from grpo_dist.tasks.competition_math import task as competition_math
from grpo_dist.terminal import show

MOVED = {"planner": "examples/planner/planner_rows.py"}  # tasks that are examples, with what writes their rows


def prepare_arithmetic(local_save_dir: str) -> Written:
    """Write the built-in task as train.parquet and validation.parquet. Returns rows by file written."""
    return write_splits({split: arithmetic.rows(split) for split in arithmetic.SIZES}, local_save_dir)


def main(arguments: Sequence[str]) -> int:
    """Write one data set. Returns the exit code: 0, or 2 for something the user can mend."""
    if arguments and (file := MOVED.get(arguments[0])):
        show(f"{arguments[0]}: this task has moved; run python {' '.join([file, *arguments[1:]])}\n", sys.stderr)
        return 2
    options = vars(_parser().parse_args(arguments))
    prepare: Callable[..., Written] = options.pop("prepare")
    try:
        written = prepare(**options)
    except GrpoDistError as error:
        show(f"{error}\n", sys.stderr)
        return error.exit_code
    for path, num_rows in written.items():
        show(f"{path}: {num_rows:,} rows\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo-dist data", description="Data sets as parquet.")
    tasks = parser.add_subparsers(metavar="TASK", required=True)

    def add(name: str, prepare: Callable[..., Written], text: str) -> argparse.ArgumentParser:
        task = tasks.add_parser(name, help=text, description=text)
        task.add_argument("--local_save_dir", required=True, help="folder to write to")
        task.set_defaults(prepare=prepare)
        return task

    local = "folder with train and test as .jsonl, .json or .parquet; default: the Hugging Face hub"
    for name, task, text in (
        ("gsm8k", gsm8k, "grade school mathematics: 7,473 training and 1,319 test questions"),
        ("math", competition_math, "competition mathematics: 7,500 training and 5,000 test problems"),
    ):
        add(name, partial(convert, task.make_row, hub=task.HUB), text).add_argument(LOCAL_KEY, help=local)
    tasks_of = add("folders", folders.prepare, "task folders in Harbor's layout")
    tasks_of.add_argument(LOCAL_KEY, required=True, help="folder with task folders, each with an instruction.md")
    generated = add("countdown", countdown.prepare, "reach a target with given numbers; generated")
    generated.add_argument("--num_numbers", type=int, nargs="+", default=[3, 4], help="numbers given (3 4)")
    gym = add("reasoning_gym", reasoning_gym.prepare, "tasks of Reasoning Gym, one or a mixture; generated")
    share = "NAME, or '{NAME: {weight: 2, SETTING: VALUE}}' as YAML"
    gym.add_argument("--task", nargs="+", required=True, metavar="TASK", help=share)
    gym.add_argument("--instruction", default=reasoning_gym.INSTRUCTION, help="behind each question (%(default)s)")
    gym.add_argument("--allow_eval", action="store_true", help="take tasks whose scorers run answers as Python code")
    for command in (generated, gym):
        command.add_argument("--train_size", type=int, default=8000, help="rows in train.parquet (%(default)s)")
        command.add_argument("--test_size", type=int, default=200, help="rows in test.parquet (%(default)s)")
        command.add_argument("--seed", type=int, default=0, help="another seed, other rows (%(default)s)")
    add("arithmetic", prepare_arithmetic, "the built-in task")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
