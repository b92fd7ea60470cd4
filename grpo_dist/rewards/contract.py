"""The contract of a reward function, and the one place that calls one: for a group, the responses to one prompt.

    response   compute_score(data_source, solution_str, ground_truth, extra_info)                 verl; one call each
    batch      compute_score(data_sources, solution_strs, ground_truths, extra_infos)             verl's batch manager
    trl        reward(prompts, completions, **columns)                                            TRL
               with data_source, ground_truth, the row's other columns and every entry of extra_info, as lists, as far
               as the function takes them; completion_ids, trainer_state, log_extra, log_metric where it names them

Each also gets `reward_kwargs` and may be `async def`; calls for single responses then run at the same time. The form is
told by the names of the parameters (`form_of`). A response's result is a finite number, or {"score": a finite number,
"any_other_name": value, ...}.

`pred`, the answer as text, lets validation take the majority of the answers (maj@n); None, a blank text and nan are no
answer. `acc` is what validation reports as accuracy, where there is one. `step_scores`, a list of numbers, are the
rewards of the response's steps (data/step_tokens.py), for process supervision; `NAME.step_scores` are others, which
`reward_model.retrain.label=NAME` may learn from.

verl's contract: arguments are passed by keyword; `solution_str` is the decoded response without the prompt.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from grpo_dist.errors import ConfigError, GrpoDistError, RewardError
from grpo_dist.plugins.registry import traceback_tail

Form = Literal["response", "batch", "trl"]

SHOWN_CHARACTERS = 200  # of a response, in messages
SHOWN_MESSAGE = 500  # characters of what a failing function raised
STEPS_OF = ".step_scores"  # behind the name of another value: the numbers of steps that belong to it
LARGEST = 3.4028234e38  # what a float32, in which scores travel, can hold
RESPONSE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = tuple(f"{name}s" for name in RESPONSE_ARGUMENTS)
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class RowNeeds:
    """The parts of a row that a reward function reads beside its data source, its prompt and extra_info.

    Attributes:
        ground_truth: whether it needs one: its argument of that name has no default value.
        needed: columns, or entries of extra_info, that it cannot do without.
        taken: all columns that it takes; None: whatever columns there are.
        asked: whether there is a function to ask at all; not where an agent loop gives the reward.
    """

    ground_truth: bool = True
    needed: frozenset[str] = frozenset()
    taken: frozenset[str] | None = frozenset()
    asked: bool = True


@dataclass(frozen=True)
class RewardFunction:
    """A scorer, its name in messages, the keyword arguments from custom_reward_function, and its form.

    `components` are those of its values that are rewards of their own, with their weights, if it declares them: its
    module has `declare_components(**reward_kwargs) -> {name: weight}`. `adv_estimator=gdpo` compares them.

    `parts` are the functions of a weighted sum; one that `is_part` may return None where it does not apply.
    """

    name: str
    function: Callable[..., Any]
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    form: Form = "response"
    is_async: bool = False
    components: Mapping[str, float] = field(default_factory=dict)
    needs: RowNeeds = RowNeeds()
    parts: tuple[Part, ...] = ()
    is_part: bool = False


class Part(NamedTuple):
    """A function of a weighted sum, with the name of its score."""

    label: str
    function: RewardFunction
    weight: float


@dataclass(frozen=True)
class RewardResult:
    """The judgement of the reward function on one response.

    Attributes:
        score: the reward, a finite number; nan where the function failed and reward.failure_score is not set.
        extra: the other finite numbers that the function returned; they are logged as metrics.
        step_scores: the finite rewards of the response's steps; None if the function gave none.
        pred: the answer that the function found, for the majority vote of validation; None if it found none.
        failure: why the function failed on the response, whose score is then reward.failure_score; "": it did not.
        applies: whether a part of a sum has a score for the response; it has none where it returned None.
        texts: the values that are texts, but for `pred`; `algorithm.self_distillation` may show one.
        judged_steps: other finite numbers for the steps, by the NAME of a value `NAME.step_scores`.
    """

    score: float
    extra: dict[str, float]
    step_scores: tuple[float, ...] | None = None
    pred: str | None = None
    failure: str = ""
    judged_steps: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    applies: bool = True


@dataclass(frozen=True)
class Sample:
    """One response to score, and its row: see `Prompt` for the fields that come from there.

    `token_ids` are those of the response (None: a text that somebody wrote has none), `step` is the last one that was
    trained before, and `max_steps` the number of the run's (None: not known).
    """

    solution_str: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]]
    columns: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False
    token_ids: Sequence[int] | None = None
    step: int = 0
    max_steps: int | None = None


@dataclass(frozen=True)
class Failure:
    """Why a response could not be scored."""

    text: str


def score_response(
    function: RewardFunction, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> RewardResult:
    """Call the reward function for one response and check what comes back.

    Booleans count as 0 and 1. Extra values that are no numbers (text, None, lists) do not become metrics.

    Raises:
        RewardError: the function raised, or returned something that is neither a finite number nor a dict
            with a finite "score"; the message names the function, the data source and the response.
    """
    arguments = _arguments(Sample(solution_str, data_source, ground_truth, dict(extra_info), []))
    try:
        returned = function.function(**arguments, **function.reward_kwargs)
    except GrpoDistError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() in a scorer must not end its process without a word
        raise RewardError(describe_failure(function, data_source, solution_str, error)) from error
    return checked_result(returned, function, data_source, solution_str)


def form_of(function: Callable[..., Any]) -> Form:
    """Return the form of a function, told by the names of its parameters."""
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
        GrpoDistError: a mistake in config or data, not in one response, such as a data source without a scorer.
    """
    if function.parts:
        yield from _score_sum(function, samples)
        return
    if function.form == "response" and not function.is_async:
        for sample in samples:
            try:
                yield score_response(function, **_arguments(copy.deepcopy(sample)))
            except RewardError as error:
                yield Failure(str(error))
        return
    samples = [copy.deepcopy(sample) for sample in samples]
    if function.form == "response":
        yield from asyncio.run(_score_at_once(function, samples))
    else:
        yield from _score_batch(function, samples)


def takes_one(function: RewardFunction) -> bool:
    """Return whether the function is called for one response after the other."""
    if function.parts:
        return all(takes_one(part.function) for part in function.parts)
    return function.form == "response" and not function.is_async


def _score_sum(function: RewardFunction, samples: Sequence[Sample]) -> Iterator[RewardResult | Failure]:
    """Yield the weighted sum of functions of any forms; a response on which one of them fails has failed."""
    streams = [score_group(part.function, samples) for part in function.parts]
    for sample, *outcomes in zip(samples, *streams, strict=True):
        results = [outcome for outcome in outcomes if isinstance(outcome, RewardResult)]
        if len(results) < len(outcomes):
            yield next(outcome for outcome in outcomes if isinstance(outcome, Failure))
            continue
        try:
            yield _check(function, sample, weighted_sum(function.parts, results))
        except RewardError as error:
            yield Failure(f"{error}\n{shown_response(sample.solution_str)}")


def weighted_sum(parts: Sequence[Part], results: Sequence[RewardResult]) -> dict[str, Any]:
    """Return the sum of the scores that functions gave a response; see weighted.py.

    Returns:
        score, each function's score under its label, and their extra values and texts as `LABEL.NAME`; `acc` of the
        first that gives it, and `pred` of the first that finds an answer. If a function judges steps also
        `step_scores`, and its own ones as `LABEL.step_scores`.

    Raises:
        RewardError: no function applies to the response, or two of them judge another number of steps.
    """
    total = 0.0
    values: dict[str, Any] = {}
    whole = 0.0  # what judges the whole response
    judged: list[tuple[str, float, tuple[float, ...]]] = []
    applying = [(part, result) for part, result in zip(parts, results, strict=True) if result.applies]
    if not applying:
        names = ", ".join(part.function.name for part in parts)
        raise RewardError(f"{names} returned None for the response; where that is meant, set reward.max_failure_rate=1")
    for (label, _, weight), result in applying:
        total += weight * result.score
        if result.step_scores is None:
            whole += weight * result.score
        else:
            judged.append((label, weight, result.step_scores))
        if result.pred is not None:
            values.setdefault("pred", result.pred)
        if "acc" in result.extra:
            values.setdefault("acc", result.extra["acc"])
        said = {**result.extra, **result.texts}
        values |= {label: result.score, **{f"{label}.{name}": value for name, value in said.items()}}
    return values | {"score": total} | _step_sums(judged, whole)


def _step_sums(judged: Sequence[tuple[str, float, tuple[float, ...]]], whole: float) -> dict[str, Any]:
    """Return the scores of steps: of each function (label, weight, scores) that judges them, and their sum."""
    if not judged:
        return {}
    counts = {label: len(scores) for label, _, scores in judged}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{label} {count}" for label, count in counts.items())
        raise RewardError(f"the functions judge different numbers of steps of a response: {numbers}")
    weights = [weight for _, weight, _ in judged]
    by_step = zip(*(scores for *_, scores in judged), strict=True)
    sums = [math.fsum(weight * score for weight, score in zip(weights, step, strict=True)) for step in by_step]
    if sums:
        sums[-1] += whole
    return {"step_scores": sums} | {f"{label}.step_scores": list(scores) for label, _, scores in judged}


async def _score_at_once(function: RewardFunction, samples: Sequence[Sample]) -> list[RewardResult | Failure]:
    async def one(sample: Sample) -> RewardResult | Failure:
        try:
            returned = await function.function(**_arguments(sample), **function.reward_kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's function raises
            return _failure(function, sample, error)
        return _check(function, sample, returned)

    return await asyncio.gather(*(one(sample) for sample in samples))


def _score_batch(function: RewardFunction, samples: Sequence[Sample]) -> Iterator[RewardResult | Failure]:
    logged = [dict[str, Any]() for _ in samples]  # of each, as if the function had returned it beside the score
    arguments = {f"{name}s": [getattr(sample, name) for sample in samples] for name in RESPONSE_ARGUMENTS}
    if function.form == "trl":
        arguments = _trl_arguments(function, samples, logged)
    try:
        returned = function.function(**arguments, **function.reward_kwargs)
        scores = asyncio.run(returned) if inspect.iscoroutine(returned) else returned
        if not isinstance(scores, Iterable):
            raise TypeError(
                f"must return a list with a score for each of {len(samples)} responses, returned {scores!r}"
            )
        values = list(itertools.islice(scores, len(samples) + 1))  # a generator need not have an end
        if len(values) != len(samples):
            number = f"{len(values)}" if len(values) < len(samples) else "more"
            raise ValueError(f"returned {number} scores for {len(samples)} responses")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's function raises
        yield from [_failure(function, samples[0], error)] * len(samples)
        return
    for sample, value, own in zip(samples, values, logged, strict=True):
        if own and value is not None:
            value = own | (dict(value) if isinstance(value, Mapping) else {"score": value})
        yield _check(function, sample, value)


def _loggers(logged: Sequence[dict[str, Any]]) -> dict[str, Callable[..., None]]:
    """Return TRL's `log_extra` and `log_metric`: what they are given becomes values of the responses, in `logged`."""
    metrics: dict[str, list[float]] = {}

    def log_extra(column: str, values: Iterable[Any]) -> None:
        for own, value in zip(logged, values, strict=True):
            own[column] = value if isinstance(value, numbers.Real) else str(value)

    def log_metric(name: str, value: float) -> None:
        metrics.setdefault(name, []).append(float(value))
        for own in logged:
            own[name] = math.fsum(metrics[name]) / len(metrics[name])

    return {"log_extra": log_extra, "log_metric": log_metric}


def _failure(function: RewardFunction, sample: Sample, error: BaseException) -> Failure:
    """Return the failure that an error stands for; a mistake of the run, and not of one response, is raised again."""
    if isinstance(error, GrpoDistError) and not isinstance(error, RewardError):
        raise error
    if isinstance(error, RewardError):
        return Failure(str(error))
    return Failure(describe_failure(function, sample.data_source, sample.solution_str, error))


def _check(function: RewardFunction, sample: Sample, returned: Any) -> RewardResult | Failure:
    try:
        return checked_result(returned, function, sample.data_source, sample.solution_str)
    except RewardError as error:
        return Failure(str(error))


def _arguments(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in RESPONSE_ARGUMENTS}


def _trl_arguments(function: RewardFunction, samples: Sequence[Sample], logged: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a TRL function takes of prompts, completions and columns, and what TRL's trainer gives beside them.

    Prompts and completions are lists of messages (a completion has one), or texts where the row's prompt is a text.
    """
    columns: dict[str, Any] = {
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
    most = {} if samples[0].max_steps is None else {"max_steps": samples[0].max_steps}
    trainer = {"trainer_state": SimpleNamespace(global_step=samples[0].step, **most), **_loggers(logged)}
    if tokens := [list(s.token_ids) for s in samples if s.token_ids is not None]:
        trainer["completion_ids"] = tokens
    parameters = inspect.signature(function.function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    # Who takes any column need not know what to do with the trainer's. What the config says stands above all.
    given = {n: v for n, v in given.items() if takes_all or n in parameters}
    given |= {n: v for n, v in trainer.items() if n in parameters}
    return {n: v for n, v in given.items() if n not in function.reward_kwargs}


def describe_failure(function: RewardFunction, data_source: str, solution_str: str, error: BaseException) -> str:
    """Return a message with what a user needs to find the fault: function, data source, response, traceback's end."""
    try:
        said = str(error)[:SHOWN_MESSAGE]
    except Exception:  # noqa: BLE001 - whatever the user's exception raises
        said = "(its message cannot be read)"
    where, response = f"reward function {function.name}, data_source={data_source!r}", shown_response(solution_str)
    return f"{where} raised {type(error).__name__}: {said}\n{response}\n{traceback_tail(error)}"


def shown_response(solution_str: str) -> str:
    """Return the beginning of a response, as messages show it."""
    return f"response: {_beginning(solution_str)}"


def shown_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the beginning of a prompt's last message, as messages show it."""
    return f"prompt: {_beginning(str(messages[-1].get('content', '')) if messages else '')}"


def _beginning(text: str) -> str:
    return f"{text[:SHOWN_CHARACTERS]!r}{'...' if len(text) > SHOWN_CHARACTERS else ''}"


def checked_result(returned: Any, function: RewardFunction, data_source: str, solution_str: str) -> RewardResult:
    """Check what a reward function returned; a RewardError with function and row if its score is no finite number."""
    if returned is None and function.is_part:
        return RewardResult(0.0, {}, applies=False)
    try:
        return _read_result(returned)
    except Exception as error:  # noqa: BLE001 - the values are the user's objects: looking at them may raise anything
        problem = str(error) if type(error) is ValueError else f"returned what cannot be read: {type(error).__name__}"
        problem += "; where None is meant, set reward.max_failure_rate=1" * (returned is None)
        where = f"reward function {function.name}, data_source={data_source!r}"
        raise RewardError(f"{where}: {problem}\n{shown_response(solution_str)}") from None


def _read_result(returned: Any) -> RewardResult:
    if not isinstance(returned, Mapping):
        return RewardResult(_finite(returned, "must return a finite number or a dict with 'score', returned"), {})
    if "score" not in returned:
        raise ValueError(f"returned a dict without 'score': {_show(returned)}")
    score = _finite(returned["score"], "'score' must be a finite number, is")
    extra = {}
    steps = _step_scores("step_scores", returned["step_scores"]) if returned.get("step_scores") is not None else None
    judged = {
        str(name).removesuffix(STEPS_OF): _step_scores(str(name), value)
        for name, value in returned.items()
        if str(name).endswith(STEPS_OF) and value is not None
    }
    for name, value in returned.items():
        if name not in ("score", "step_scores", "pred") and _number(value) is not None:
            extra[str(name)] = _finite(value, f"{name!r} must be finite, is")
    texts = {str(name): value for name, value in returned.items() if isinstance(value, str) and name != "pred"}
    return RewardResult(score, extra, steps, _answer(returned.get("pred")), judged_steps=judged, texts=texts)


def _answer(pred: Any) -> str | None:
    """Return the answer that a function found as text; None for what stands for no answer: None, nan and blank text."""
    text = "" if pred is None else str(pred)
    number = _number(pred)
    return None if not text.strip() or (number is not None and math.isnan(number)) else text


def _step_scores(name: str, steps: Any) -> tuple[float, ...]:
    if isinstance(steps, str | Mapping) or not isinstance(steps, Iterable):
        raise ValueError(f"{name!r} must be a list of numbers, is {_show(steps)}")
    return tuple(_finite(value, f"{name!r} must be finite numbers, one is") for value in steps)


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Check an argument of a scorer before a run starts."""
    if value not in allowed:
        raise ConfigError(f"custom_reward_function.reward_kwargs.{name}={value!r}: must be one of {', '.join(allowed)}")


def _finite(value: Any, complaint: str) -> float:
    number = _number(value)
    if number is None or not abs(number) <= LARGEST:  # nan is not
        raise ValueError(f"{complaint} {_show(value)}")
    return number


def _number(value: Any) -> float | None:
    """Return a Python, numpy or one-element torch number as a float; None for anything else."""
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # an integer beyond the range of floats
            return math.inf
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        item = value.item()
        return None if item is value or hasattr(item, "shape") else _number(item)
    return None


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 120 else text[:117] + '...'} ({type(value).__name__})"
