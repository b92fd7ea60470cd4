"""A model that answers in this process, asked as its run asked it: for `generate` and `eval`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from grpo_dist.assets import BUILTIN
from grpo_dist.assets.tokenizer import load_tokenizer
from grpo_dist.cli.check_reward import sample_of
from grpo_dist.cli.trained import TrainedModel, engine_for
from grpo_dist.config.data_files import HUB, SUFFIXES
from grpo_dist.config.schema import DataConfig
from grpo_dist.data.prompts import Prompt, add_system_prompt
from grpo_dist.data.tokenize import named_rows, tokenize_prompts
from grpo_dist.engines.base import Response, RolloutEngine, rollout_engine
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.rewards.contract import RewardResult, RowNeeds
from grpo_dist.rewards.forms import Failure
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.terminal import show
from grpo_dist.trainer.rollout.job import group_seed
from grpo_dist.trainer.run_prompts import overlong_note, read_prompts

MAX_TOKENS = 512  # of a response, where neither the run nor the user says how long it may be
NO_ANSWERS = RowNeeds(ground_truth=False, taken=None, asked=False)  # of rows that are not scored
VALIDATION_STEP = 0  # whose seeds validation has, so that a run's own figures come out again


@dataclass
class Asker:
    """An engine that answers conversations.

    Attributes:
        engine: started.
        sampling: how it samples; a seed is replaced by one for each prompt.
        limits: the section `data` of the run whose rows are asked: what it validates on; None: prompts of the user's
            own, which are asked whole.
    """

    model: TrainedModel
    engine: RolloutEngine
    tokenizer: Any
    sampling: SamplingSettings
    limits: DataConfig | None = None

    def token_ids(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, list[int]]]:
        """The prompts with the run's system prompt and template, within `limits`; those without room for a token are
        left out. What is cut or left out is told.

        Raises:
            DataError: the template refuses one, or all are too long.
        """
        limits, longest = self.limits, self.engine.settings.max_model_len
        usage = self.model.usage
        if usage.system_prompt is not None:
            prompts, _ = add_system_prompt(prompts, usage.system_prompt)
        tokenized, overlong = tokenize_prompts(
            prompts,
            self.tokenizer,
            max_prompt_length=sys.maxsize if limits is None else limits.max_prompt_length,
            truncation="error" if limits is None else limits.truncation,
            filter_overlong_prompts=limits is not None and limits.filter_overlong_prompts,
            apply_chat_template_kwargs=usage.apply_chat_template_kwargs,
        )
        if limits is not None and overlong:
            show(f"{self.model.name}: {overlong_note(limits, len(prompts), overlong)}\n", sys.stderr)
        if left_out := [prompt.prompt.location for prompt in tokenized if len(prompt.token_ids) >= longest]:
            reason = f"they have {longest} tokens or more (--max-model-len): {named_rows(left_out)}"
            if len(left_out) == len(tokenized):
                raise DataError(f"no prompt is left to ask: {reason}; ask for more")
            show(f"{self.model.name}: left out, since {reason}\n", sys.stderr)
        return [(prompt.prompt, prompt.token_ids.tolist()) for prompt in tokenized if len(prompt.token_ids) < longest]

    async def answer(self, index: int, token_ids: list[int]) -> list[Response]:
        """`sampling.n` responses to a prompt.

        Raises:
            EngineError: the engine failed.
        """
        whole = self.sampling
        seed = None if whole.seed is None else group_seed(whole.seed, VALIDATION_STEP, index)
        room = self.engine.settings.max_model_len - len(token_ids)
        sampling = replace(whole, seed=seed, max_tokens=min(whole.max_tokens, room))
        responses = await self.engine.generate(token_ids, sampling)
        assert responses is not None, "nobody aborts it"
        return responses

    async def answers(self, prompts: Sequence[Prompt]) -> AsyncIterator[tuple[Prompt, list[Response]]]:
        """The responses to all prompts, which are asked at once; in the order of the prompts."""
        tokenized = self.token_ids(prompts)
        tasks = [asyncio.create_task(self.answer(prompt.index, ids)) for prompt, ids in tokenized]
        try:
            for (prompt, _), task in zip(tokenized, tasks, strict=True):
                yield prompt, await task
        finally:
            for task in tasks:
                task.cancel()

    async def chat(self, messages: list[dict[str, str]]) -> list[str]:
        """The texts of the answers to a conversation."""
        [(_, ids)] = self.token_ids([prompt_of(messages)])
        return [self.text(response) for response in await self.answer(0, ids)]

    def text(self, response: Response) -> str:
        """A response without special tokens, as reward functions get it."""
        return str(self.tokenizer.decode(response.token_ids, skip_special_tokens=True))


@asynccontextmanager
async def asking(
    model: TrainedModel,
    sampling: SamplingSettings,
    max_model_len: int | None = None,
    limits: DataConfig | None = None,
) -> AsyncIterator[Asker]:
    """A started engine, stopped at the end of the block; see `engine_for`, and `Asker` for `limits`."""
    settings = engine_for(model, max_model_len)
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=settings.model.trust_remote_code)
    show(f"starting an engine on {settings.device} with {model.folder}\n", sys.stderr)
    warnings.simplefilter("ignore")  # what vLLM imports warns of what it imports
    engine, began = rollout_engine(settings.rollout.name)(settings), time.monotonic()
    await engine.start()
    show(f"engine ready after {time.monotonic() - began:.0f} s\n", sys.stderr)
    try:
        yield Asker(model, engine, tokenizer, sampling, limits)
    finally:
        engine.shutdown()


def sampling_of(model: TrainedModel, options: argparse.Namespace) -> SamplingSettings:
    """As the run validates, with the user's options; several answers are drawn, as greedy ones are all the same."""
    usual = {"max_tokens": MAX_TOKENS} | dict(model.usage.sampling)
    asked = {field.name: getattr(options, field.name, None) for field in fields(SamplingSettings)}
    given = {name: value for name, value in asked.items() if value is not None}
    chosen = replace(model.plan.val_sampling, **usual | given)
    if chosen.n > 1 and chosen.temperature == 0.0 and "temperature" not in given:
        chosen = replace(chosen, temperature=model.config.actor_rollout_ref.rollout.temperature)
    return replace(chosen, stop=tuple(chosen.stop))


PROMPTS: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "FILE|TEXT",
    "help": "a file of rows (.jsonl, .json, .parquet, or as data.val_files names them), or a text; may be repeated",
}


def given_prompts(model: TrainedModel, given: Sequence[str]) -> tuple[list[Prompt], bool]:
    """Return what `--prompts` names, and whether these are rows of files."""
    files = [text for text in given if text.endswith(SUFFIXES) or text.startswith((BUILTIN, HUB))]
    if files and len(files) < len(given):
        raise ConfigError("--prompts: files of rows or texts, not both")
    if files:
        return read_prompts(model.config, "--prompts", files, -1, NO_ANSWERS), True
    texts = [[{"role": "user", "content": text}] for text in given]
    prompts = [prompt_of(messages, i, f"prompt {i + 1}") for i, messages in enumerate(texts)]
    return [replace(prompt, is_plain=not model.config.data.apply_chat_template) for prompt in prompts], False


def prompt_of(messages: list[dict[str, str]], index: int = 0, location: str = "prompt") -> Prompt:
    """A conversation as a row."""
    return Prompt(index, "", messages, None, {}, location)


async def judge(
    asker: Asker, scorer: Scorer, prompt: Prompt, responses: Sequence[Response]
) -> list[RewardResult | Failure]:
    """Return what the reward function says of the responses to a prompt, all together, as in a run."""
    step, most = asker.model.usage.step or 0, asker.model.config.trainer.total_training_steps
    samples = [
        replace(sample_of(prompt, asker.text(one)), token_ids=one.token_ids, step=step, max_steps=most)
        for one in responses
    ]
    return await asyncio.to_thread(scorer.score, samples)
