"""Reads, checks and tokenizes the prompts of a run, and decides their training order."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_dist.agents import load_agent_loop
from grpo_dist.agents.base import KEY as AGENT_KEY
from grpo_dist.assets.model_folder import ModelFolder, end_token_ids, load_tokenizer
from grpo_dist.config.schema import DataConfig, RunConfig
from grpo_dist.config.schema_roles import AgentConfig
from grpo_dist.data.images import ImageProcessor
from grpo_dist.data.prompts import NO_DATA_SOURCE, SOURCE, Prompt, add_system_prompt, load_prompts, sifted, unread_notes
from grpo_dist.data.sampler import CustomSampler, PassRateCurriculum, PromptSampler
from grpo_dist.data.tokenize import TokenizedPrompt, check_token_ids, named_rows, tokenize_prompts
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import CodeName, absolute
from grpo_dist.rewards import check_data_sources
from grpo_dist.rewards.contract import RowNeeds
from grpo_dist.trainer.checkpoint.config_changes import identify_prompts

MOST_SHOWN = 300  # characters of a prompt


@dataclass
class Prompts:
    """The tokenized prompts of a run, and the sampler that decides their training order."""

    train: Sequence[TokenizedPrompt]
    validation: Sequence[TokenizedPrompt]
    sampler: PromptSampler | CustomSampler

    @property
    def counts(self) -> str:
        """Say how many prompts there are, in a line."""
        return f"prompts: {len(self.train)} for training, {len(self.validation)} for validation"

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Number and fingerprint of the training prompts; see `identify_prompts`."""
        return identify_prompts(self.train)


def model_setting(config: RunConfig) -> str:
    """The key and value that name the model, for messages."""
    return f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}"


def load(config: RunConfig, model: ModelFolder | None, needs: RowNeeds) -> tuple[Prompts, int, list[str]] | None:
    """Load the prompts (`load_run_prompts`); returns them, the number of training steps, and notes.

    Without a model only check the rows.
    """
    data = config.data
    if model is None:
        read_prompts(config, "data.train_files", data.train_files, data.train_max_samples, needs)
        if data.val_files:
            read_prompts(config, "data.val_files", data.val_files, data.val_max_samples, needs)
        return None
    prompts, notes = load_run_prompts(config, model, needs)
    steps = total_steps(config, prompts)
    if late := [step for step in config.trainer.profile_steps or () if step > steps]:
        notes.append(f"trainer.profile_steps: the run has {steps} steps, so no profile of {late}; name earlier ones")
    return prompts, steps, notes


def load_run_prompts(config: RunConfig, model: ModelFolder, needs: RowNeeds | None = None) -> tuple[Prompts, list[str]]:
    """Read and tokenize the prompts; returns them, and notes on them for the user.

    Args:
        needs: what the reward function reads of a row; None: what verl's functions read.

    Raises:
        DataError: a file, a row or the tokenizer is invalid, or there are fewer prompts than a batch needs.
        ConfigError: a data source has no scorer, or the sampler class does not exist.
    """
    data = config.data
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
    needs = needs or RowNeeds()
    check_template(config, model, tokenizer)
    read = functools.partial(_load, config, tokenizer, image_processor(config, str(model.folder)), needs)
    train, notes = read("data.train_files", data.train_files, data.train_max_samples)
    text = str(tokenizer.decode(train[0].token_ids)) if train else ""
    tag, code = re.search(r"<([\w.-]+)>\s*$", text), config.custom_reward_function
    if tag and needs.asked and code.path is not None and "opened" not in str(config.reward_code.reward_kwargs):
        notes.append(
            f"data.train_files: the first prompt ends in {tag[0]}, which no response has then; if the reward function "
            f"looks for it, as grpo_dist.rewards.format does: custom_reward_function.reward_kwargs.opened={tag[1]}"
        )
    if config.trainer.dry_run and train:
        left = f"... ({len(text):,} characters)" if len(text) > MOST_SHOWN else ""
        notes.append(f"data.train_files: the first prompt, as the model reads it: {text[:MOST_SHOWN]!r}{left}")
    validation: list[TokenizedPrompt] = []
    if data.val_files:
        validation, more = read("data.val_files", data.val_files, data.val_max_samples)
        notes += more
    if model.vocab_size is not None:
        largest = ((row.prompt.location, int(row.token_ids.max())) for row in [*train, *validation])
        check_token_ids(largest, model.vocab_size, setting=model_setting(config))
    return Prompts(train, validation, new_sampler(config, train)), notes


def check_template(config: RunConfig, model: ModelFolder, tokenizer: Any) -> None:
    """Check that the model's chat template has what the agent loop needs; a ConfigError if not."""
    agent = config.actor_rollout_ref.rollout.agent
    loop = load_agent_loop(agent.default_agent_loop, agent.agent_kwargs)
    ids = {*end_token_ids(model.folder, setting=model_setting(config)), tokenizer.eos_token_id} - {None}
    ends = {tokenizer.decode([token_id]) for token_id in ids}
    loop.check_template(agent.agent_kwargs, tokenizer, template_kwargs(config), ends)


def image_processor(config: RunConfig, folder: str) -> ImageProcessor | None:
    """Return the processor of the policy's folder; None: rows have no images."""
    if config.data.image_key is None:
        return None
    trusted = config.actor_rollout_ref.model.trust_remote_code
    return ImageProcessor(folder, setting=model_setting(config), trust_remote_code=trusted)


def _load(
    config: RunConfig,
    tokenizer: Any,
    processor: ImageProcessor | None,
    needs: RowNeeds,
    key: str,
    files: Sequence[str],
    most: int,
) -> tuple[list[TokenizedPrompt], list[str]]:
    data, prompts = config.data, read_prompts(config, key, files, most, needs)
    agent = config.actor_rollout_ref.rollout.agent
    has_environment = "environment" in agent.agent_kwargs
    unread = unread_notes(key, prompts, agent.default_agent_loop, has_environment=has_environment)
    notes = [*_taken(key, prompts), *unread]
    if data.exclude_rows is not None and key == "data.train_files":
        prompts = sifted(prompts, data.exclude_rows, key, notes)
    if data.system_prompt is not None:
        prompts, num_kept = add_system_prompt(prompts, data.system_prompt)
        if num_kept:
            why = "have a system message of their own and keep it (data.system_prompt)"
            notes.append(f"{key}: {num_kept} of {len(prompts)} prompts {why}")
    tokenized, overlong = tokenize_rows(config, tokenizer, processor, prompts)
    if overlong:
        notes.append(f"{key}: {overlong_note(data, len(prompts), overlong)}")
    return tokenized, notes


def tokenize_rows(
    config: RunConfig, tokenizer: Any, processor: ImageProcessor | None, prompts: Sequence[Prompt]
) -> tuple[list[TokenizedPrompt], list[Prompt]]:
    """Tokenize rows as the run does; also returns those that are too long, which were left out or cut."""
    return tokenize_prompts(
        prompts,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
        filter_overlong_prompts=config.data.filter_overlong_prompts,
        apply_chat_template_kwargs=template_kwargs(config),
        image_processor=processor,
    )


def overlong_note(data: DataConfig, count: int, overlong: Sequence[Prompt]) -> str:
    """Return what became of prompts that are longer than `data.max_prompt_length`, of `count` prompts in all."""
    what = "were left out" if data.filter_overlong_prompts else f"were cut (data.truncation={data.truncation})"
    named = named_rows([prompt.location for prompt in overlong])
    return (
        f"{len(overlong)} of {count} prompts are longer than data.max_prompt_length={data.max_prompt_length} tokens "
        f"and {what}: {named}"
    )


def workers_agent(config: RunConfig) -> AgentConfig:
    """Return the section of the agent loop as rollout workers get it, who run in other folders."""
    agent = config.actor_rollout_ref.rollout.agent
    kwargs = load_agent_loop(agent.default_agent_loop, agent.agent_kwargs).resolved(agent.agent_kwargs)
    return agent.replaced(default_agent_loop=absolute(agent.default_agent_loop), agent_kwargs=kwargs)


def template_kwargs(config: RunConfig) -> dict[str, Any]:
    """The chat template's variables for prompts: `data.apply_chat_template_kwargs` and the agent loop's own.

    Raises:
        ConfigError: one is in both.
    """
    agent, given = config.actor_rollout_ref.rollout.agent, config.data.apply_chat_template_kwargs
    own = load_agent_loop(agent.default_agent_loop, agent.agent_kwargs).template_kwargs(agent.agent_kwargs)
    if both := sorted(own.keys() & given.keys()):
        raise ConfigError(
            f"data.apply_chat_template_kwargs.{both[0]}: {AGENT_KEY}={agent.default_agent_loop} sets it; leave it out"
        )
    return {**given, **own}


def _taken(key: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """A note on the columns that were found without being named."""
    counts = Counter(entry for prompt in prompts for entry in prompt.taken.items())
    if counts:
        read_as = (
            f"{name}={value}" + ("" if count == len(prompts) else f" ({count} of {len(prompts)} rows)")
            for (name, value), count in counts.items()
        )
        yield f"{key}: rows are read as with {', '.join(read_as)}; set these keys where something else is meant"


def read_prompts(
    config: RunConfig, key: str, files: Sequence[str], most: int, needs: RowNeeds | None = None
) -> list[Prompt]:
    """The rows of one config key, with all checks that need no tokenizer; `needs` as in `load_run_prompts`.

    Raises:
        DataError: a file or a row is invalid.
        ConfigError: a data source has no scorer.
    """
    data, needs = config.data, needs or RowNeeds()
    built_in, may_be_unnamed = needs.asked and None in config.reward_paths, data.reward_fn_key == SOURCE
    needs_ground_truth = needs.asked and config.needs_ground_truth
    unnamed = NO_DATA_SOURCE if may_be_unnamed and not needs_ground_truth else None
    prompts = load_prompts(
        files,
        key=key,
        max_samples=most,
        shuffle_seed=config.data_seed if data.shuffle and key == "data.train_files" else None,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        answer_key=data.answer_key,
        prompt_template=data.prompt_template,
        image_key=data.image_key,
        data_source=data.data_source or unnamed,
        needs_ground_truth=needs_ground_truth and needs.ground_truth,
        needs_source=built_in or not may_be_unnamed,
        needed=needs.needed,
        kept=needs.taken,
    )
    if built_in:
        check_data_sources(prompt.data_source for prompt in prompts)
    return prompts if data.apply_chat_template else [replace(prompt, is_plain=prompt.is_text) for prompt in prompts]


def training_rows(config: RunConfig, most: int, needs: RowNeeds) -> list[Prompt]:
    """The rows of `data.train_files`, with the run's system prompt; see `read_prompts`."""
    rows = read_prompts(config, "data.train_files", config.data.train_files, most, needs)
    return rows if config.data.system_prompt is None else add_system_prompt(rows, config.data.system_prompt)[0]


def new_sampler(config: RunConfig, train: Sequence[TokenizedPrompt]) -> PromptSampler | CustomSampler:
    """The sampler of the training prompts: shuffled, in file order, by pass rates, or a custom class."""
    data, code, options = config.data, config.data.sampler.code, dict[str, Any]()
    batch_size = data.gen_batch_size or data.train_batch_size
    if data.curriculum.enable:
        code = CodeName(PassRateCurriculum.__module__, PassRateCurriculum.__name__)
        options = data.curriculum.model_dump(exclude={"enable"})
    if code is None:
        return PromptSampler(len(train), batch_size, shuffle=data.shuffle, seed=config.data_seed)
    prompts = [tokenized.prompt for tokenized in train]
    return CustomSampler(code.source, code.attribute, prompts, batch_size, seed=config.data_seed, **options)


def total_steps(config: RunConfig, prompts: Prompts) -> int:
    """Number of training steps: trainer.total_training_steps, else total_epochs over the prompts; at least 1."""
    wanted = config.data.train_batch_size
    sampled = config.data.gen_batch_size or wanted
    per_epoch = prompts.sampler.steps_per_epoch * sampled // max(sampled, wanted)
    return config.trainer.total_training_steps or max(1, config.trainer.total_epochs * per_epoch)
