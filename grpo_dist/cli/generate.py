"""`grpo-dist generate RUN_OR_MODEL`: answers to prompts from a file, from the command line, or in a chat."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from grpo_dist.assets import BUILTIN
from grpo_dist.assets.paths import expanded
from grpo_dist.cli.asking import Asker, add_sampling_arguments, asking, check_new, judge, prompt_of, sampling_of
from grpo_dist.cli.chat import Chat
from grpo_dist.cli.scoring import start_scorer
from grpo_dist.cli.trained import TrainedModel, add_model_argument, find_trained
from grpo_dist.config.data_files import HUB, SUFFIXES
from grpo_dist.data.prompts import Prompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.names import REWARD_MODEL_FUNCTION
from grpo_dist.rewards import check_data_sources
from grpo_dist.rewards.base import RewardResult, RowNeeds
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.terminal import json_line, show
from grpo_dist.trainer.run_prompts import read_prompts


def main(arguments: Sequence[str]) -> int:
    """Answer prompts.

    Raises:
        ConfigError: there is no such model or option, or the output exists.
        GrpoDistError: see errors.py.
    """
    options = _parser().parse_intermixed_args(arguments)
    check_new(options.output)
    model = find_trained(options.model, options.overrides, options.step, trust=options.trust)
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
        elif options.output is not None:
            with expanded(options.output).open("x", encoding="utf-8") as file:
                await _write_rows(asker, prompts, file)
        elif rows:
            await _write_rows(asker, prompts, sys.stdout)
        else:
            async for _, responses in asker.answers(prompts):
                show("".join(f"{asker.text(response)}\n" for response in responses))


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


async def _write_rows(asker: Asker, prompts: Sequence[Prompt], file: TextIO) -> None:
    """A JSON line for each prompt, as soon as it and those before it are answered."""
    scorer = _scorer(asker.model, prompts)
    try:
        async for prompt, responses in asker.answers(prompts):
            texts = [asker.text(response) for response in responses]
            row: dict[str, Any] = {"prompt": prompt.messages, "responses": texts}
            row["truncated"] = [response.truncated for response in responses]
            if prompt.ground_truth is not None:
                row["ground_truth"] = prompt.ground_truth
            if scorer is not None:
                found = await judge(scorer, prompt, texts)
                row["scores"] = [each.score if isinstance(each, RewardResult) else None for each in found]
            file.write(json_line(row))
            file.flush()
    finally:
        if scorer is not None:
            scorer.stop()


def _scorer(model: TrainedModel, prompts: Sequence[Prompt]) -> Scorer | None:
    """The run's reward function, if the rows have what it compares with."""
    config = model.config
    if config.reward_function == REWARD_MODEL_FUNCTION or all(prompt.ground_truth is None for prompt in prompts):
        return None
    if model.unscored:
        show(f"without scores: {model.unscored}\n", sys.stderr)
        return None
    if None in config.reward_paths:
        try:
            check_data_sources(prompt.data_source for prompt in prompts)
        except ConfigError as error:
            show(f"without scores: {error}\n", sys.stderr)
            return None
    return start_scorer(config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo-dist generate",
        description="Answer prompts with a trained model, asked as its run asked it. Without prompts: a chat.",
    )
    add_model_argument(parser)
    prompts = "a file of rows (.jsonl, .json, .parquet, or as data.val_files names them), or a text; may be repeated"
    parser.add_argument("--prompts", action="append", default=[], metavar="FILE|TEXT", help=prompts)
    output = "write rows as JSON lines: prompt, responses, truncated, and scores if the rows have ground truths"
    parser.add_argument("--output", metavar="FILE", help=output)
    parser.add_argument("--step", type=int, help="of the run's checkpoint; default: the last one")
    add_sampling_arguments(parser, n=1)
    return parser
