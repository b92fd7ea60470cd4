"""GSM8K (https://arxiv.org/abs/2110.14168): grade school mathematics, 7,473 training and 1,319 test questions."""

from __future__ import annotations

import re
from functools import partial

from grpo_dist.data.prepare.files import Row, convert, hub_examples, local_examples, require_text
from grpo_dist.errors import DataError

GSM8K = "openai/gsm8k"
# verl's wording, so that results can be compared with its published ones.
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


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
    require_text(example, ("question", "answer"), location)
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
    """Write train.parquet and test.parquet.

    Args:
        local_save_dir: where to; made if it is not there.
        local_dataset_path: folder with train and test, such as train.jsonl and test.jsonl of the original release.
            None: the Hugging Face hub, through the `datasets` library.

    Returns:
        Rows by file written.
    """
    hub = partial(hub_examples, GSM8K, "main")
    read = hub if local_dataset_path is None else partial(local_examples, local_dataset_path)
    return convert(gsm8k_row, read, local_save_dir)
