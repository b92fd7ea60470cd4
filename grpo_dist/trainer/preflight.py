"""Looks at what a run will read, without starting anything: the model folder, the first rows, the reward file.

A dry run does all of it; a run checks the model folder before it starts Ray, and everything else on its way. Loads
neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from grpo_dist.assets import BUILTIN, resolve_model_path
from grpo_dist.assets.model_folder import ModelFolder, check_model_folder
from grpo_dist.assets.paths import is_file, is_folder
from grpo_dist.config.data_files import DataFileProblem, parse_data_file
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.files import locate_rows
from grpo_dist.data.prompts import Prompt, add_system_prompt, checked_prompt
from grpo_dist.data.tokenize import check_token_ids, load_tokenizer, tokenize_prompts
from grpo_dist.rewards import check_data_sources
from grpo_dist.rewards.scorer import Scorer

FIRST_ROWS = 100  # of each data file


def model_setting(config: RunConfig) -> str:
    """The key and value that name the model, for messages."""
    return f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}"


def check_model(config: RunConfig) -> ModelFolder:
    """Find the model folder, downloading one of the hub's, and check its files.

    Raises:
        ConfigError: there is none.
        DataError: a file of it is missing, damaged or does not fit the others.
    """
    model = config.actor_rollout_ref.model
    folder = resolve_model_path(model.path)
    return check_model_folder(folder, setting=model_setting(config), trust_remote_code=model.trust_remote_code)


def preflight(config: RunConfig) -> Iterator[str]:
    """Check what is on this machine and say so, a line at a time; what is not there is said too.

    Raises:
        GrpoDistError: something is there and cannot be used.
    """
    model, tokenizer = config.actor_rollout_ref.model, None
    if model.path.startswith(BUILTIN) or is_folder(model.path):
        found = check_model(config)
        tokenizer = load_tokenizer(str(found.folder), trust_remote_code=model.trust_remote_code)
        weights = f"{found.num_tensors} tensors in {found.num_files} file" + ("s" if found.num_files > 1 else "")
        yield f"checked: {model.path}: {found.model_type}, {weights}, tokenizer"
    else:
        found = None
        yield f"not checked: {model.path}: not a folder on this machine, and nothing is downloaded"
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for file in files:
            yield _check_file(config, key, file, tokenizer, None if found is None else found.vocab_size)
    yield from _check_reward(config)


def _check_file(config: RunConfig, key: str, file: str, tokenizer: Any, vocab_size: int | None) -> str:
    """Read, check and tokenize the first rows of one entry."""
    parsed, data = parse_data_file(file), config.data
    if isinstance(parsed, DataFileProblem):
        return f"not checked: {file}: {parsed.text}"
    if parsed.kind == "hub":
        return f"not checked: {file}: nothing is downloaded"
    rows = list(islice(locate_rows([file], key=key), FIRST_ROWS + 1))
    names = {"key": key, "prompt_key": data.prompt_key, "reward_fn_key": data.reward_fn_key}
    prompts = [checked_prompt(row, i, where, **names) for i, (where, row) in enumerate(rows[:FIRST_ROWS])]
    if config.custom_reward_function.path is None:
        check_data_sources(prompt.data_source for prompt in prompts)
    remark = "" if tokenizer is None else _check_tokens(config, prompts, tokenizer, vocab_size)
    count = f"the first {FIRST_ROWS} rows" if len(rows) > FIRST_ROWS else f"{len(rows)} rows"
    return f"checked: {file}: {count}{remark}"


def _check_tokens(config: RunConfig, prompts: Sequence[Prompt], tokenizer: Any, vocab_size: int | None) -> str:
    data = config.data
    if data.system_prompt is not None:
        prompts, _ = add_system_prompt(prompts, data.system_prompt)
    tokenized, overlong = tokenize_prompts(
        prompts,
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        truncation="left" if data.filter_overlong_prompts else data.truncation,
        filter_overlong_prompts=False,  # later rows may be short where the first are all too long
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    if vocab_size is not None:
        check_token_ids(tokenized, vocab_size, setting=model_setting(config))
    limit = f"data.max_prompt_length={data.max_prompt_length} tokens"
    return f", {len(overlong) or 'none'} longer than {limit}"


def _check_reward(config: RunConfig) -> Iterator[str]:
    """Import the reward function, if it is a file that is here or a module."""
    reward = config.custom_reward_function
    if reward.path is None:
        return
    source = reward.path.removeprefix("file://")
    if source.endswith(".py") and not is_file(source):
        yield f"not checked: {reward.path}: no such file"
        return
    import_reward_function(reward.path, config)
    yield f"checked: {reward.path}: {reward.name} can be called"


def import_reward_function(path: str, config: RunConfig) -> None:
    """Import the user's reward function in a process of its own, as the reward processes do.

    Raises:
        ConfigError: it is not there, or cannot be imported.
        RewardError: importing it hangs, or ends its process.
    """
    reward = config.custom_reward_function
    scorer = Scorer(path, reward.name, reward.reward_kwargs, timeout_s=config.reward.timeout_s)
    try:
        scorer.start()
    finally:
        scorer.stop()
