"""The contract of a reward function, and the one place that calls one.

    compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)
        -> a finite number, or {"score": a finite number, "any_other_name": value, ...}

`pred`, the answer as text, lets validation take the majority of the answers (maj@n); None, a blank text and nan are no
answer. `acc` is what validation reports as accuracy, where there is one. `step_scores`, a list of numbers, are the
rewards of the response's steps (data/step_tokens.py), for process supervision; `NAME.step_scores` are others, which
`reward_model.retrain.label=NAME` may learn from.

verl's contract: arguments are passed by keyword; `solution_str` is the decoded response without the prompt.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from grpo_dist.errors import ConfigError, GrpoDistError, RewardError
from grpo_dist.plugins.registry import traceback_tail

Form = Literal["response", "batch", "trl"]

SHOWN_CHARACTERS = 200  # of a response, in messages
SHOWN_MESSAGE = 500  # characters of what a failing function raised
STEPS_OF = ".step_scores"  # behind the name of another value: the numbers of steps that belong to it
LARGEST = 3.4028234e38  # what a float32, in which scores travel, can hold


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
    """A scorer, its name in messages, the keyword arguments from custom_reward_function, and its form (forms.py).

    `components` are those of its values that are rewards of their own, with their weights, if it declares them: its
    module has `declare_components(**reward_kwargs) -> {name: weight}`. `adv_estimator=gdpo` compares them.

    `parts` are the functions of a weighted sum; `is_part` says of them that they may return None for a response, to
    which they then do not apply.
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


def score_response(
    function: RewardFunction,
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
) -> RewardResult:
    """Call the reward function for one response and check what comes back.

    Booleans count as 0 and 1. Extra values that are no numbers (text, None, lists) cannot be averaged
    and do not become metrics. The function gets its own copy of `extra_info`'s top level (of all, from `score_group`).

    Raises:
        RewardError: the function raised, or returned something that is neither a finite number nor a dict
            with a finite "score"; the message names the function, the data source and the response.
    """
    try:
        returned = function.function(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=dict(extra_info),
            **function.reward_kwargs,
        )
    except GrpoDistError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() in a scorer must not end its process without a word
        raise RewardError(describe_failure(function, data_source, solution_str, error)) from error
    return checked_result(returned, function, data_source, solution_str)


def describe_failure(function: RewardFunction, data_source: str, solution_str: str, error: BaseException) -> str:
    """Return a message with what a user needs to find the fault: function, data source, response, traceback's end."""
    where = f"reward function {function.name}, data_source={data_source!r}"
    response = shown_response(solution_str)
    return f"{where} raised {type(error).__name__}: {_said(error)}\n{response}\n{traceback_tail(error)}"


def _said(error: BaseException) -> str:
    try:
        return str(error)[:SHOWN_MESSAGE]
    except Exception:  # noqa: BLE001 - whatever the user's exception raises
        return "(its message cannot be read)"


def shown_response(solution_str: str) -> str:
    """Return the beginning of a response, as messages show it."""
    return f"response: {_beginning(solution_str)}"


def shown_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the beginning of a prompt's last message, as messages show it."""
    return f"prompt: {_beginning(str(messages[-1].get('content', '')) if messages else '')}"


def _beginning(text: str) -> str:
    return f"{text[:SHOWN_CHARACTERS]!r}{'...' if len(text) > SHOWN_CHARACTERS else ''}"


def checked_result(returned: Any, function: RewardFunction, data_source: str, solution_str: str) -> RewardResult:
    """Check what a reward function returned for one response.

    Raises:
        RewardError: it is neither a finite number nor a dict with a finite "score"; the message names the function,
            the data source and the response.
    """
    if returned is None and function.is_part:
        return RewardResult(0.0, {}, applies=False)
    try:
        return _read_result(returned)
    except Exception as error:  # noqa: BLE001 - the values are the user's objects: looking at them may raise anything
        problem = str(error) if type(error) is ValueError else f"returned what cannot be read: {type(error).__name__}"
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
