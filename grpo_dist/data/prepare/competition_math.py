r"""MATH (https://arxiv.org/abs/2103.03874): competition mathematics, 7,500 training and 5,000 test problems."""

from __future__ import annotations

from functools import partial

from grpo_dist.boxed import last_boxed
from grpo_dist.data.prepare.files import Row, convert, hub_examples, local_examples, require_text
from grpo_dist.errors import DataError

MATH = "DigitalLearningGmbH/MATH-lighteval"
# verl's wording, so that results can be compared with its published ones.
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def math_row(example: Row, *, split: str, index: int, location: str) -> Row:
    r"""One MATH example in verl's schema; the ground truth is what stands in the last `\boxed{...}` of the solution.

    Args:
        example: "problem" and "solution", text; "level" and "type" (the subject) are kept where they are there.
        split: "train" or "test".
        index: position in the split, from 0.
        location: file and row, for messages.

    Raises:
        DataError: a field is missing, or the solution has no closed box with something in it.
    """
    require_text(example, ("problem", "solution"), location)
    problem, solution = example["problem"], example["solution"]
    answer = last_boxed(solution)
    if not answer:
        raise DataError(f"{location}: the solution has no '\\boxed{{ANSWER}}': ...{solution[-80:]!r}")
    kept = {name: str(example[name]) for name in ("level", "type") if example.get(name) is not None}
    return {
        "data_source": MATH,
        "prompt": [{"role": "user", "content": f"{problem} {MATH_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, **kept},
    }


def prepare_math(local_save_dir: str, *, local_dataset_path: str | None) -> dict[str, int]:
    """Write train.parquet and test.parquet.

    Args:
        local_save_dir: where to; made if it is not there.
        local_dataset_path: folder with the files of train and test; see `local_examples`. None: the Hugging Face hub,
            through the `datasets` library.

    Returns:
        Rows by file written.
    """
    hub = partial(hub_examples, MATH, "default")
    read = hub if local_dataset_path is None else partial(local_examples, local_dataset_path)
    return convert(math_row, read, local_save_dir)
