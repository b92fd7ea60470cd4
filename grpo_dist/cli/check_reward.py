"""`grpo-dist check-reward key=value ...`: scores a few rows' own answers as a run would, without Ray, in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

from grpo_dist.checks.own_code import started_scorer
from grpo_dist.cli.arguments import command_parser
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.plugins.names import REWARD_MODEL_FUNCTION, RM_SCORE
from grpo_dist.rewards.contract import Failure, RewardResult, RowNeeds, Sample
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.terminal import show
from grpo_dist.trainer.run_prompts import training_rows

# Columns, and entries of extra_info, that hold a whole answer, beside the ground truth that it is compared with.
OWN_ANSWERS = ("completion", "solution", "response", "answer")
MOST_SHOWN = 160  # characters of a prompt's end and of a response


def main(arguments: Sequence[str]) -> int:
    """Score answers and show what the reward function says; 1 if it fails on one of them."""
    parser = command_parser(
        "check-reward",
        "Score a few rows' own answers, or answers of yours, as a run with this config would. Exit code 1: "
        "the function failed on one; 2: something is wrong with the config.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the run's config (grpo-dist train --help)")
    parser.add_argument("--rows", type=int, default=5, help="how many rows of data.train_files to score (%(default)s)")
    parser.add_argument("--row", type=int, help="score this one row, counted from 1")
    answer = "score this response instead; several are scored together, as the group of a prompt is"
    parser.add_argument("--answer", action="append", default=[], metavar="TEXT", help=answer)
    options = parser.parse_intermixed_args(arguments)
    config, _ = load_config(options.overrides)
    stand_in = {RM_SCORE: 0.0} if config.reward_model.enable else {}
    max_steps, num_failed = config.trainer.total_training_steps, 0
    scores: list[float] = []
    with scorer_alone(config) as scorer:
        for prompt in _rows(config, scorer.needs, options.row, options.rows):
            answers = [(text, "--answer") for text in options.answer] or [own_answer(prompt)]
            row = replace(prompt, extra_info=prompt.extra_info | stand_in)
            results = scorer.score([sample_of(row, text, max_steps=max_steps) for text, _ in answers])
            scores += [result.score for result in results if isinstance(result, RewardResult)]
            num_failed += sum(isinstance(result, Failure) for result in results)
            printed, num_more = scorer.printed.take()
            printed += [f"... and {num_more} more lines"] if num_more else []
            show("\n".join(_shown(prompt, answers, results, printed)) + "\n")
    show("\n".join(_summary(config, scores, num_failed, given=bool(options.answer))) + "\n")
    return 1 if num_failed else 0


def scorer_alone(config: RunConfig) -> AbstractContextManager[Scorer]:
    """Start the reward function for a block, without what only a run has."""
    if config.reward_function == REWARD_MODEL_FUNCTION:
        raise ConfigError(
            "reward_model.enable=true: the reward is the score of the reward model, which only a run's workers can "
            "compute (trainer.val_only=true); set custom_reward_function.path=FILE to score with a function"
        )
    return started_scorer(config)


def sample_of(prompt: Prompt, text: str, **more: Any) -> Sample:
    """Return a response to a row, with what a reward process knows of the row, and `more` fields of it."""
    of_row = {field.name: getattr(prompt, field.name) for field in fields(Sample) if hasattr(prompt, field.name)}
    return Sample(solution_str=text, **of_row, **more)


def own_answer(prompt: Prompt) -> tuple[str, str]:
    """Return the whole answer that a row has, else its ground truth, and where that comes from."""
    for name in OWN_ANSWERS:
        if isinstance(text := {**prompt.columns, **prompt.extra_info}.get(name), str) and text:
            return text, f"the row's {name}"
    truth = prompt.ground_truth
    if truth is None:
        raise ConfigError(f"{prompt.location}: the row has no answer of its own; give one with --answer TEXT")
    return truth if isinstance(truth, str) else json.dumps(truth, default=str), "the row's ground truth"


def _rows(config: RunConfig, needs: RowNeeds, row: int | None, most: int) -> list[Prompt]:
    prompts = training_rows(config, -1, needs)
    if row is None:
        return prompts[:most]
    if not 1 <= row <= len(prompts):
        raise ConfigError(f"--row {row}: data.train_files has rows 1 to {len(prompts)}")
    return [prompts[row - 1]]


def _shown(
    prompt: Prompt, answers: Sequence[tuple[str, str]], results: Sequence[RewardResult | Failure], printed: list[str]
) -> Iterator[str]:
    text = prompt.messages[-1]["content"]
    yield f"{prompt.location}, data_source={prompt.data_source}"
    yield f"  prompt     {'...' if len(text) > MOST_SHOWN else ''}{text[-MOST_SHOWN:]!r}"
    for (text, source), result in zip(answers, results, strict=True):
        left = "..." if len(text) > MOST_SHOWN else ""
        yield f"  response   {text[:MOST_SHOWN]!r}{left} ({source})"
        if isinstance(result, Failure):
            yield "  FAILED     " + result.text.replace("\n", "\n             ")
            continue
        yield f"  score      {result.score:g}"
        values = {**result.extra, **({} if result.pred is None else {"pred": result.pred})}
        if result.step_scores is not None:
            values["step_scores"] = list(result.step_scores)
        if values:
            texts = (f"{k}={value:g}" if isinstance(value, float) else f"{k}={value}" for k, value in values.items())
            yield f"  values     {', '.join(texts)}"
    for line in printed:
        yield f"  printed    {line}"


def _summary(config: RunConfig, scores: Sequence[float], num_failed: int, *, given: bool) -> Iterator[str]:
    span = f", scores from {min(scores):g} to {max(scores):g}" if scores else ""
    yield f"\n{len(scores) + num_failed} responses: {len(scores)} scored, {num_failed} failed{span}"
    if scores and max(scores) <= 0 and not given:
        form = "a ground truth alone may lack the form that the function looks for, such as '#### 42' or '\\boxed{42}'"
        yield f"no own answer earned more than 0: {form}; try one with --answer"
    if config.reward_model.enable:
        yield f"the reward model was not asked: {RM_SCORE} was 0"
    if config.reward.overlong_buffer.enable:
        yield "without the penalty of reward.overlong_buffer, which counts tokens"
