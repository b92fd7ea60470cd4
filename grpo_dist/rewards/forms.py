"""The responses to one prompt, scored by whatever form of reward function the user wrote.

    response   compute_score(data_source, solution_str, ground_truth, extra_info)                 verl; one call each
    batch      compute_score(data_sources, solution_strs, ground_truths, extra_infos)             verl's batch manager
    trl        reward(prompts, completions, **columns)                                            TRL
               with data_source, ground_truth, the row's other columns and every entry of extra_info, as lists, as far
               as the function takes them

Each may be `async def`; calls for single responses then run at the same time. The form is told by the names of the
parameters (`form_of`).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_dist.errors import GrpoDistError, RewardError
from grpo_dist.rewards.base import (
    Form,
    RewardFunction,
    RewardResult,
    checked_result,
    describe_failure,
    score_response,
    shown_response,
)
from grpo_dist.rewards.weighted_sum import weighted_sum

BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL_ARGUMENTS = ("prompts", "completions")


@dataclass(frozen=True)
class Sample:
    """One response to score, and its row: see `Prompt` for the fields that come from there."""

    solution_str: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]]
    columns: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False


@dataclass(frozen=True)
class Failure:
    """Why a response could not be scored."""

    text: str


def form_of(function: Callable[..., Any]) -> Form:
    """The form of a function, told by the names of its parameters."""
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return "response"
    if names >= {"completions"} and "solution_str" not in names:
        return "trl"
    return "batch" if names >= {"solution_strs"} else "response"


def score_group(function: RewardFunction, samples: Sequence[Sample]) -> Iterator[RewardResult | Failure]:
    """Score the samples and yield one result for each, in order; at once where the function takes one response.

    Each call gets its own copies, so that a function that changes a ground truth changes nothing for the next call.

    Raises:
        GrpoDistError: a mistake in the config or the data and not in one response, such as a data source without a
            scorer.
    """
    if function.parts:
        yield from _score_sum(function, samples)
        return
    if function.form == "response" and not function.is_async:
        for sample in samples:
            yield _score_one(function, copy.deepcopy(sample))
        return
    samples = [copy.deepcopy(sample) for sample in samples]
    if function.form == "response":
        yield from asyncio.run(_score_at_once(function, samples))
    else:
        yield from _score_batch(function, samples)


def takes_one(function: RewardFunction) -> bool:
    """Whether the function is called for one response after the other."""
    if function.parts:
        return all(takes_one(part.function) for part in function.parts)
    return function.form == "response" and not function.is_async


def _score_sum(function: RewardFunction, samples: Sequence[Sample]) -> Iterator[RewardResult | Failure]:
    """The weighted sum of functions of any forms; a response on which one of them fails has failed."""
    streams = [score_group(part.function, samples) for part in function.parts]
    for sample, *found in zip(samples, *streams, strict=True):
        results = [each for each in found if isinstance(each, RewardResult)]
        if len(results) < len(found):
            yield next(each for each in found if isinstance(each, Failure))
            continue
        try:
            yield _check(function, sample, weighted_sum(function.parts, results))
        except RewardError as error:
            yield Failure(f"{error}\n{shown_response(sample.solution_str)}")


def _score_one(function: RewardFunction, sample: Sample) -> RewardResult | Failure:
    try:
        return score_response(
            function,
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
    except RewardError as error:
        return Failure(str(error))


async def _score_at_once(function: RewardFunction, samples: Sequence[Sample]) -> list[RewardResult | Failure]:
    async def one(sample: Sample) -> RewardResult | Failure:
        try:
            returned = await function.function(
                data_source=sample.data_source,
                solution_str=sample.solution_str,
                ground_truth=sample.ground_truth,
                extra_info=dict(sample.extra_info),
                **function.reward_kwargs,
            )
        except RewardError as error:
            return Failure(str(error))
        except GrpoDistError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's function raises
            return Failure(describe_failure(function, sample.data_source, sample.solution_str, error))
        return _check(function, sample, returned)

    return await asyncio.gather(*(one(sample) for sample in samples))


def _score_batch(function: RewardFunction, samples: Sequence[Sample]) -> Iterator[RewardResult | Failure]:
    arguments = _trl_arguments(function, samples) if function.form == "trl" else _batch_arguments(samples)
    try:
        returned = function.function(**arguments, **function.reward_kwargs)
        found = asyncio.run(returned) if inspect.iscoroutine(returned) else returned
        values = list(itertools.islice(found, len(samples) + 1))  # a generator need not have an end
        if len(values) != len(samples):
            number = f"{len(values)}" if len(values) < len(samples) else "more"
            raise ValueError(f"returned {number} scores for {len(samples)} responses")
    except RewardError as error:
        yield from [Failure(str(error))] * len(samples)
        return
    except GrpoDistError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's function raises
        text = describe_failure(function, samples[0].data_source, samples[0].solution_str, error)
        yield from [Failure(text)] * len(samples)
        return
    for sample, value in zip(samples, values, strict=True):
        yield _check(function, sample, value)


def _check(function: RewardFunction, sample: Sample, returned: Any) -> RewardResult | Failure:
    try:
        return checked_result(returned, function, sample.data_source, sample.solution_str)
    except RewardError as error:
        return Failure(str(error))


def _batch_arguments(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    return {
        "data_sources": [sample.data_source for sample in samples],
        "solution_strs": [sample.solution_str for sample in samples],
        "ground_truths": [sample.ground_truth for sample in samples],
        "extra_infos": [dict(sample.extra_info) for sample in samples],
    }


def _trl_arguments(function: RewardFunction, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What a TRL function takes of prompts, completions and columns. Both are lists of messages, a completion of one of
    the assistant's; or texts, where the row's prompt is a text.
    """
    columns: dict[str, list[Any]] = {
        "prompts": [s.messages[-1]["content"] if s.is_text else list(s.messages) for s in samples],
        "completions": [
            s.solution_str if s.is_text else [{"role": "assistant", "content": s.solution_str}] for s in samples
        ],
    }
    rows = [
        s.columns | {"data_source": s.data_source, "ground_truth": s.ground_truth} | dict(s.extra_info)
        | {"extra_info": dict(s.extra_info)}
        for s in samples
    ]  # fmt: skip
    names = dict.fromkeys(str(name) for row in rows for name in row)
    given = {name: [row.get(name) for row in rows] for name in names} | columns
    parameters = inspect.signature(function.function).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    # What the config says stands above a column of that name.
    return {n: v for n, v in given.items() if (takes_all or n in parameters) and n not in function.reward_kwargs}
