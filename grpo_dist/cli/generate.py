"""`grpo-dist generate RUN_OR_MODEL`: answers to prompts from a file, from the command line, or in a chat."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

from grpo_dist.assets import BUILTIN
from grpo_dist.cli.chat import Chat
from grpo_dist.cli.trained import TrainedModel, add_model_argument, engine_for, find_trained
from grpo_dist.config.data_files import HUB, SUFFIXES
from grpo_dist.data.prompts import Prompt, add_system_prompt
from grpo_dist.data.tokenize import load_tokenizer, named_rows, tokenize_prompts
from grpo_dist.engines.base import Response, RolloutEngine, rollout_engine
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.names import REWARD_MODEL_FUNCTION
from grpo_dist.rewards import check_data_sources
from grpo_dist.rewards.base import RewardResult, RowNeeds
from grpo_dist.rewards.forms import Sample
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.trainer.rollout.seeds import group_seed
from grpo_dist.trainer.run_prompts import read_prompts
from grpo_dist.trainer.settings import sampling_settings

MAX_TOKENS = 512  # of a response, where neither the run nor the user says how long it may be


@dataclass
class Asker:
    """An engine that answers conversations.

    Attributes:
        model: what it runs.
        engine: started.
        tokenizer: of the model.
        sampling: how it samples; a seed is replaced by one for each prompt.
    """

    model: TrainedModel
    engine: RolloutEngine
    tokenizer: Any
    sampling: SamplingSettings
    overlong: list[Prompt] = field(default_factory=list)

    def token_ids(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, list[int]]]:
        """The prompts with the run's system prompt and template; those without room for a token are left out.

        Raises:
            DataError: the template refuses one, or all are too long.
        """
        usage = self.model.usage
        if usage.system_prompt is not None:
            prompts, _ = add_system_prompt(prompts, usage.system_prompt)
        tokenized, self.overlong = tokenize_prompts(
            prompts,
            self.tokenizer,
            max_prompt_length=self.engine.settings.max_model_len - 1,
            truncation="error",
            filter_overlong_prompts=True,
            apply_chat_template_kwargs=usage.apply_chat_template_kwargs,
        )
        return [(each.prompt, each.token_ids.tolist()) for each in tokenized]

    async def answer(self, index: int, token_ids: list[int]) -> list[Response]:
        """`sampling.n` responses to a prompt.

        Raises:
            EngineError: the engine failed.
        """
        seed = None if self.sampling.seed is None else group_seed(self.sampling.seed, 0, index)
        found = await self.engine.generate(token_ids, replace(self.sampling, seed=seed))
        assert found is not None, "nobody aborts it"
        return found

    async def chat(self, messages: list[dict[str, str]]) -> list[str]:
        """The texts of the answers to a conversation."""
        [(_, ids)] = self.token_ids([prompt_of(messages)])
        return [self.text(response) for response in await self.answer(0, ids)]

    def text(self, response: Response) -> str:
        """A response without special tokens."""
        return str(self.tokenizer.decode(response.token_ids, skip_special_tokens=True))


def main(arguments: Sequence[str]) -> int:
    """Answer prompts.

    Raises:
        ConfigError: there is no such model or option, or the output exists.
        GrpoDistError: see errors.py.
    """
    options = _parser().parse_intermixed_args(arguments)
    if options.output is not None and Path(options.output).exists():
        raise ConfigError(f"--output {options.output} exists; remove it, or name another file")
    model = find_trained(options.model, options.overrides, options.step)
    sampling = sampling_of(model, options)
    prompts, rows = _prompts(model, options.prompts)
    asyncio.run(_run(model, sampling, options, prompts, rows=rows))
    return 0


async def _run(
    model: TrainedModel, sampling: SamplingSettings, options: argparse.Namespace, prompts: list[Prompt], *, rows: bool
) -> None:
    async with asking(model, sampling, options.max_model_len) as asker:
        if not prompts:
            await Chat(asker.chat, model.name).run()
        elif options.output is None:
            await _answer_all(asker, prompts, sys.stdout, as_rows=rows)
        else:
            with Path(options.output).open("x") as file:
                await _answer_all(asker, prompts, file, as_rows=True)


@asynccontextmanager
async def asking(
    model: TrainedModel, sampling: SamplingSettings, max_model_len: int | None = None
) -> AsyncIterator[Asker]:
    """A started engine, stopped at the end of the block."""
    settings = engine_for(model, max_model_len)
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=settings.trust_remote_code)
    engine = rollout_engine(settings.engine)(settings)
    sys.stderr.write(f"starting an engine on {settings.device} with {model.folder}\n")
    warnings.simplefilter("ignore")  # what vLLM imports warns of what it imports
    await engine.start()
    try:
        yield Asker(model, engine, tokenizer, sampling)
    finally:
        engine.shutdown()


def sampling_of(model: TrainedModel, options: argparse.Namespace) -> SamplingSettings:
    """As the run validates, with the user's options; several answers are drawn, as greedy ones are all the same."""
    _, sampling = sampling_settings(model.config)
    usual = {"max_tokens": MAX_TOKENS} | dict(model.usage.sampling)
    asked = {field.name: getattr(options, field.name, None) for field in fields(SamplingSettings)}
    given = {name: value for name, value in asked.items() if value is not None}
    found = replace(sampling, **{"n": 1} | usual | given)
    if found.n > 1 and found.temperature == 0.0 and "temperature" not in given:
        found = replace(found, temperature=model.config.actor_rollout_ref.rollout.temperature)
    return replace(found, stop=tuple(found.stop))


def prompt_of(messages: list[dict[str, str]], index: int = 0, location: str = "prompt") -> Prompt:
    """A conversation as a row."""
    return Prompt(index, "", messages, None, {}, location)


def _prompts(model: TrainedModel, given: Sequence[str]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they are rows of files; none on a terminal: a chat."""
    if not given and not sys.stdin.isatty():
        given = [line.strip() for line in sys.stdin if line.strip()]
        if not given:
            raise DataError("no prompts: nothing came on standard input; give --prompts FILE or --prompts TEXT")
    files = [each for each in given if each.endswith(SUFFIXES) or each.startswith((BUILTIN, HUB))]
    if files and len(files) < len(given):
        raise ConfigError("--prompts: files of rows or texts, not both")
    if files:
        needs = RowNeeds(ground_truth=False, taken=None, asked=False)
        return read_prompts(model.config, "--prompts", files, -1, needs), True
    texts = [[{"role": "user", "content": text}] for text in given]
    return [prompt_of(messages, i, f"prompt {i + 1}") for i, messages in enumerate(texts)], False


async def _answer_all(asker: Asker, prompts: Sequence[Prompt], file: TextIO, *, as_rows: bool) -> None:
    """Answer all prompts at once, and write each answer when those before it are written."""
    tokenized = asker.token_ids(prompts)
    if asker.overlong:
        named = named_rows([prompt.location for prompt in asker.overlong])
        longest = asker.engine.settings.max_model_len
        sys.stderr.write(f"left out, since they have {longest} tokens or more (--max-model-len): {named}\n")
    scorer = _scorer(asker.model, [prompt for prompt, _ in tokenized]) if as_rows else None
    answers = [asyncio.create_task(asker.answer(prompt.index, ids)) for prompt, ids in tokenized]
    try:
        for (prompt, _), answer in zip(tokenized, answers, strict=True):
            responses = await answer
            texts = [asker.text(response) for response in responses]
            if not as_rows:
                file.write("\n".join(texts) + "\n")
                continue
            row: dict[str, Any] = {"prompt": prompt.messages, "responses": texts}
            row["truncated"] = [response.truncated for response in responses]
            if prompt.ground_truth is not None:
                row["ground_truth"] = prompt.ground_truth
            if scorer is not None:
                row["scores"] = await asyncio.to_thread(_scores, scorer, prompt, texts)
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            file.flush()
    finally:
        for answer in answers:
            answer.cancel()
        if scorer is not None:
            scorer.stop()


def _scorer(model: TrainedModel, prompts: Sequence[Prompt]) -> Scorer | None:
    """The run's reward function, if the rows have what it compares with."""
    config = model.config
    if config.reward_function == REWARD_MODEL_FUNCTION or all(prompt.ground_truth is None for prompt in prompts):
        return None
    if None in config.reward_paths:
        try:
            check_data_sources(prompt.data_source for prompt in prompts)
        except ConfigError as error:
            sys.stderr.write(f"without scores: {error}\n")
            return None
    scorer = Scorer(*config.reward_code, timeout_s=config.reward.timeout_s)
    scorer.start()
    return scorer


def _scores(scorer: Scorer, prompt: Prompt, texts: Sequence[str]) -> list[float | None]:
    """The scores of the responses; null where the function failed."""
    of_prompt = {each.name for each in fields(Prompt)}
    row = {each.name: getattr(prompt, each.name) for each in fields(Sample) if each.name in of_prompt}
    results = scorer.score([Sample(solution_str=text, **row) for text in texts])
    return [result.score if isinstance(result, RewardResult) else None for result in results]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo-dist generate",
        description="Answer prompts with a trained model, asked as its run asked it. Without prompts: a chat.",
    )
    add_model_argument(parser)
    prompts = "a file of rows (.jsonl, .json, .parquet, or as data.val_files names them), or a text; several at once"
    parser.add_argument("--prompts", action="extend", nargs="+", default=[], metavar="FILE|TEXT", help=prompts)
    output = "write rows as JSON lines: prompt, responses, truncated, and scores if the rows have ground truths"
    parser.add_argument("--output", metavar="FILE", help=output)
    parser.add_argument("--step", type=int, help="of the run's checkpoint; default: the last one")
    parser.add_argument("--n", type=int, help="answers to each prompt (1)")
    usual = "default: as the run validates"
    parser.add_argument("--temperature", type=float, help=f"0: the likeliest token each time; {usual}")
    parser.add_argument("--top-p", type=float, dest="top_p", help=usual)
    parser.add_argument("--top-k", type=int, dest="top_k", help=usual)
    parser.add_argument("--max-tokens", type=int, dest="max_tokens", help=f"of a response; {usual}")
    parser.add_argument("--seed", type=int, help="the same answers each time")
    parser.add_argument(
        "--max-model-len", type=int, dest="max_model_len", help="longest prompt and response, in tokens"
    )
    return parser
