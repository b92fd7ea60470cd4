"""Find the reward function that the config names, and check it before anything starts."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.plugins.names import OVERLONG_PENALTY, parse_code
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.redact import redact
from grpo_dist.rewards.contract import BATCH_ARGUMENTS, TRL_ARGUMENTS, Form, Part, RewardFunction, RowNeeds, form_of

PATH_KEY = "custom_reward_function.path"
_MATH = "grpo_dist.tasks.competition_math"
_MATH_SOURCES = ("DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "HuggingFaceH4/MATH-500")
_DAPO_SOURCES = (
    *("math_dapo", "math", "math_dapo_reasoning", "aime24", "aime25", "aime2024", "aime2025", "aime_2024", "aime_2025"),
    *("HuggingFaceH4/aime_2024", "Maxwell-Jia/AIME_2024", "yentinglin/aime_2025"),
)
# The built-in scorer of each data_source; a name that ends in a slash stands for all that begin with it. They are named
# and not imported: tasks lie above rewards.
SCORERS = {
    **dict.fromkeys(("openai/gsm8k", "gsm8k", "arithmetic", "squares"), "grpo_dist.tasks.gsm8k:compute_score"),
    **dict.fromkeys(_MATH_SOURCES, f"{_MATH}:compute_score"),
    **dict.fromkeys(_DAPO_SOURCES, f"{_MATH}:compute_score_dapo"),
    "countdown": "grpo_dist.tasks.countdown:compute_score",
    "reasoning_gym/": "grpo_dist.tasks.reasoning_gym:compute_score",
}
# Scorers that were elsewhere once, and where they are now; the examples are copied or named by their path.
_GRADERS = ("graded", "xml_tags", "length_penalty", "multiple_choice")
MOVED = {
    **{f"grpo_dist.rewards.{name}": f"examples/rewards/{name}.py" for name in _GRADERS},
    "grpo_dist.rewards.gsm8k": "grpo_dist.tasks.gsm8k",
    "grpo_dist.rewards.countdown": "grpo_dist.tasks.countdown",
    "grpo_dist.rewards.math_answer": _MATH,
    **dict.fromkeys(("grpo_dist.rewards.json_plan", "grpo_dist.tasks.planner"), "examples/planner/planner.py"),
}
# Names that mean something else in what a reward function returns, so that no component can have them.
RESERVED = {"score", "pred", "step_scores", OVERLONG_PENALTY}
# The arguments that every form is called with. TRL functions get the row's columns too, and take what they name.
ARGUMENTS: dict[Form, tuple[str, ...]] = {
    "response": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "batch": BATCH_ARGUMENTS,
    "trl": (*TRL_ARGUMENTS, "data_source", "ground_truth", "extra_info"),
}


def load_reward_function(path: str | None, name: str, reward_kwargs: Mapping[str, Any]) -> RewardFunction:
    """Return the reward function of `custom_reward_function`; `name` is for a path without one.

    Args:
        path: Python file or importable module, also with `:function`; None: each data source's built-in scorer.

    Raises:
        ConfigError: the function cannot be imported, cannot be called, or does not take these arguments.
    """
    if path is None:
        if reward_kwargs:
            raise ConfigError(
                f"custom_reward_function.reward_kwargs={redact(reward_kwargs)}: the built-in scorers take "
                f"none; set {PATH_KEY}, or leave it empty"
            )
        return RewardFunction("built-in", score_by_data_source)
    code = parse_code(path, name)
    if code.source in MOVED:
        raise ConfigError(f"{PATH_KEY}={path}: this scorer has moved; set {PATH_KEY}={MOVED[code.source]}")
    function = load_attribute(str(code), key="custom_reward_function.path/name")
    form, named = form_of(function), path if parse_code(path).attribute else f"{path}:{name}"
    _check_callable(function, form, named, reward_kwargs)
    module = sys.modules.get(function.__module__)
    hooks = ("check_reward_kwargs", "declare_components", "reward_parts")
    check, declare, split = (getattr(module, hook, None) for hook in hooks)
    if check is not None:  # a module may look at its arguments once, before anything starts
        check(**reward_kwargs)
    parts = tuple(split(**reward_kwargs)) if split is not None else ()
    return RewardFunction(
        named,
        function,
        dict(reward_kwargs),
        form,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        components={} if declare is None else _declared(declare, reward_kwargs),
        needs=_needs_of_all(parts) if parts else _row_needs(function, form, reward_kwargs),
        parts=parts,
    )


def score_by_data_source(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """Score a response with the built-in scorer of its data source; a ConfigError if there is none."""
    check_data_sources([data_source])
    return _built_in(data_source)(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Check that every data source has a built-in scorer; for runs without a custom reward function.

    Raises:
        ConfigError: some have none, and the message lists them and the known ones; or a scorer lacks its package.
    """
    sources = set(data_sources)
    if unknown := sorted(source for source in sources if built_in_scorer(source) is None):
        moved = f" (planner's is now {MOVED['grpo_dist.tasks.planner']})" if "planner" in unknown else ""
        raise ConfigError(
            f"no built-in scorer for data_source {', '.join(map(repr, unknown))}: set {PATH_KEY} to a Python "
            f"file with your reward function{moved}. Built-in: {', '.join(sorted(SCORERS))}"
        )
    for function in {_built_in(source) for source in sources}:
        check = getattr(sys.modules[function.__module__], "check_reward_kwargs", None)
        if check is not None:
            check()


def built_in_scorer(data_source: str) -> str | None:
    """Return the name of the scorer of a data source, if it has one."""
    return SCORERS.get(data_source) or SCORERS.get("".join(data_source.partition("/")[:2]))


@cache
def _built_in(data_source: str) -> Callable[..., Any]:
    named = built_in_scorer(data_source)
    assert named is not None, "it was looked for before"
    return load_attribute(named, key="data_source")


def _declared(declare: Callable[..., Any], reward_kwargs: Mapping[str, Any]) -> dict[str, float]:
    where = f"{PATH_KEY}: declare_components of {declare.__module__}"
    try:
        weights = declare(**reward_kwargs)
    except GrpoDistError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} fails: {type(error).__name__}: {error}") from error
    good = isinstance(weights, Mapping) and all(
        isinstance(name, str)
        and isinstance(weight, int | float)
        and not isinstance(weight, bool)
        and math.isfinite(weight)
        for name, weight in weights.items()
    )
    if not good:
        raise ConfigError(f"{where} returned {weights!r}: must be a dict of names and finite numbers")
    if reserved := sorted(RESERVED.intersection(weights)):
        raise ConfigError(f"{where}: no component can be called {reserved[0]!r}, which means something else")
    return {name: float(weight) for name, weight in weights.items()}


def _row_needs(function: Callable[..., Any], form: Form, reward_kwargs: Mapping[str, Any]) -> RowNeeds:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return RowNeeds()
    kinds, empty = inspect.Parameter, inspect.Parameter.empty
    variable = {
        name for name, parameter in parameters.items() if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    }
    named = parameters.keys() - variable - reward_kwargs.keys()
    needed = {name for name in named if parameters[name].default is empty}
    ground_truth = not needed.isdisjoint(("ground_truth", "ground_truths"))
    if form != "trl":
        return RowNeeds(ground_truth)
    takes_all = any(parameters[name].kind is kinds.VAR_KEYWORD for name in variable)
    known = ARGUMENTS["trl"]
    return RowNeeds(
        ground_truth, frozenset(needed.difference(known)), None if takes_all else frozenset(named.difference(known))
    )


def _needs_of_all(parts: Sequence[Part]) -> RowNeeds:
    needs = [part.function.needs for part in parts]
    taken = [of_part.taken for of_part in needs if of_part.taken is not None]
    return RowNeeds(
        any(of_part.ground_truth for of_part in needs),
        frozenset().union(*(of_part.needed for of_part in needs)),
        frozenset().union(*taken) if len(taken) == len(needs) else None,
    )


def _check_callable(function: Any, form: Form, spec: str, reward_kwargs: Mapping[str, Any]) -> None:
    where = f"custom_reward_function.path/name={spec}"
    if not callable(function) or inspect.isclass(function):
        kind = "a class; name an object of it" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(f"{where}: must be a function or an object that can be called, is {kind}")
    arguments = ARGUMENTS[form]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions tell nothing; the first call will
        return
    # What a TRL function asks for beyond these are columns of the rows, which are not known here.
    bind = signature.bind_partial if form == "trl" else signature.bind
    given = [] if form == "trl" else arguments
    try:
        bind(**dict.fromkeys(given), **reward_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{where}{signature}: cannot be called with keyword arguments {', '.join(arguments)} and "
            f"reward_kwargs={redact(reward_kwargs)}: {error}"
        ) from None
