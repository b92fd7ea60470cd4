from pathlib import Path

from grpo_dist.data import load_prompts
from grpo_dist.data.prompts import Prompt


def prompts_of(file: Path) -> list[Prompt]:
    """The rows of a file that a task has written, as a run reads them."""
    names = {"key": "f", "prompt_key": "prompt", "reward_fn_key": "data_source"}
    return load_prompts([str(file)], max_samples=-1, shuffle_seed=None, **names)
