"""Find the reward function that the config names, and check it before anything starts."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpo_dist.rewards.countdown
import grpo_dist.rewards.gsm8k
import grpo_dist.rewards.math_answer  # noqa: F401  (these register their data sources)
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.names import OVERLONG_PENALTY
from grpo_dist.redact import redact
from grpo_dist.registry import load_attribute
from grpo_dist.rewards.base import SCORERS, Form, RewardFunction
from grpo_dist.rewards.group import BATCH_ARGUMENTS, TRL_ARGUMENTS, form_of

PATH_KEY = "custom_reward_function.path"
# What a reward function returns besides its components, and what is added to it.
RESERVED = {"score", "pred", "step_scores", OVERLONG_PENALTY}
# What each form is always called with. TRL functions also get the row's columns, which they may leave to **kwargs.
ARGUMENTS: dict[Form, tuple[str, ...]] = {
    "response": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "batch": BATCH_ARGUMENTS,
    "trl": (*TRL_ARGUMENTS, "data_source", "ground_truth", "extra_info"),
}


def load_reward_function(path: str | None, name: str, reward_kwargs: Mapping[str, Any]) -> RewardFunction:
    """The reward function of `custom_reward_function`.

    Args:
        path: Python file or importable module; None: the built-in scorer of each row's data source.
        name: the function in it; not used without a path.
        reward_kwargs: extra keyword arguments for the function.

    Raises:
        ConfigError: it cannot be imported, is no plain function, or does not take these arguments.
    """
    if path is None:
        if reward_kwargs:
            raise ConfigError(
                f"custom_reward_function.reward_kwargs={redact(reward_kwargs)}: the built-in scorers take "
                f"none; set {PATH_KEY}, or leave it empty"
            )
        return RewardFunction("built-in", score_by_data_source)
    source = path.removeprefix("file://").removeprefix("pkg://")  # verl's forms
    if source.endswith(".py"):
        source = str(Path(source).expanduser())
    function = load_attribute(f"{source}:{name}", key="custom_reward_function.path/name")
    form = form_of(function)
    _check_callable(function, form, f"{path}:{name}", reward_kwargs)
    module = sys.modules.get(function.__module__)
    check, declare = (getattr(module, hook, None) for hook in ("check_reward_kwargs", "declare_components"))
    if check is not None:  # a module may look at its arguments once, before anything starts
        check(**reward_kwargs)
    return RewardFunction(
        f"{path}:{name}",
        function,
        dict(reward_kwargs),
        form,
        is_async=inspect.iscoroutinefunction(function),
        components={} if declare is None else _declared(declare, reward_kwargs),
    )


def score_by_data_source(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """The built-in scorer of this data source.

    Raises:
        ConfigError: there is none.
    """
    check_data_sources([data_source])
    return SCORERS.get(data_source)(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Check that every data source has a built-in scorer; for runs without a custom reward function.

    Raises:
        ConfigError: some have none; the message lists them and the known ones.
    """
    unknown = sorted(set(data_sources) - set(SCORERS.names()))
    if unknown:
        raise ConfigError(
            f"no built-in scorer for data_source {', '.join(map(repr, unknown))}: set {PATH_KEY} to a Python "
            f"file with your reward function. Built-in: {', '.join(SCORERS.names())}"
        )


def _declared(declare: Callable[..., Any], reward_kwargs: Mapping[str, Any]) -> dict[str, float]:
    """What a module's `declare_components` says: weights by the names of the components.

    Raises:
        ConfigError: it fails, or says something else; or a name has another meaning.
    """
    where = f"{PATH_KEY}: declare_components of {declare.__module__}"
    try:
        found = declare(**reward_kwargs)
    except GrpoDistError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} fails: {type(error).__name__}: {error}") from error
    good = isinstance(found, Mapping) and all(
        isinstance(name, str)
        and isinstance(weight, int | float)
        and not isinstance(weight, bool)
        and math.isfinite(weight)
        for name, weight in found.items()
    )
    if not good:
        raise ConfigError(f"{where} returned {found!r}: must be a dict of names and finite numbers")
    if reserved := sorted(RESERVED.intersection(found)):
        raise ConfigError(f"{where}: no component can be called {reserved[0]!r}, which means something else")
    return {name: float(weight) for name, weight in found.items()}


def _check_callable(function: Any, form: Form, spec: str, reward_kwargs: Mapping[str, Any]) -> None:
    where = f"custom_reward_function.path/name={spec}"
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{where}: must be a function, is {type(function).__name__}")
    arguments = ARGUMENTS[form]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions tell nothing; the first call will
        return
    # What a TRL function asks for beyond these are columns of the rows' extra_info, which are not known here.
    bind = signature.bind_partial if form == "trl" else signature.bind
    try:
        bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{where}{signature}: cannot be called with keyword arguments {', '.join(arguments)} and "
            f"reward_kwargs={redact(reward_kwargs)}: {error}"
        ) from None
