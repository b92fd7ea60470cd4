"""Reasoning Gym (https://github.com/open-thought/reasoning-gym): a hundred generated tasks, each with its own scorer.

A row (docs/environments.md#reasoning-gym) holds its entry as Python would write it: scorers compare tuples, which JSON
and parquet do not keep, and an entry that is made anew is another one for some tasks in another process, and for all
with another version. What is no answer counts for nothing: most scorers pay for any text in which the answer stands.
"""

from __future__ import annotations

import ast
import difflib
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import yaml

from grpo_dist.data.conversion import Row, Written, check_sizes, verl_row, write_splits
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.rewards.format import last_tag_content

INSTRUCTION = "Think first, then give the final answer, and nothing else, in <answer> </answer> tags."
# Their scorers hand the answer to eval(), or to sympy's parser, which does: a policy's text runs as Python.
EVALUATING = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
}


def prepare(
    local_save_dir: str,
    *,
    task: Sequence[str],
    train_size: int,
    test_size: int,
    seed: int,
    instruction: str,
    allow_eval: bool,
) -> Written:
    """Write train.parquet and test.parquet. Questions of the test are left out of the training rows.

    Args:
        task: names of tasks, or YAML, {NAME: {weight: 2, SETTING: VALUE}}; a weight is 1 unless it is given.
        seed: the same arguments with the same seed make the same files.

    Raises:
        DataError: a size is too small, a task or setting does not exist, or no training question is left.
        ConfigError: the package is not installed.
    """
    check_sizes(train_size=train_size, test_size=test_size)
    shares, count = [_share(text) for text in task], test_size + train_size
    if (evaluating := EVALUATING.intersection(name for name, _, _ in shares)) and not allow_eval:
        raise DataError(
            f"--task {', '.join(sorted(evaluating))}: the package's scorer runs answers as Python, and so whatever a "
            "model writes; --allow_eval if you want that"
        )
    recipes = [
        (name, json.dumps({"seed": seed, "size": count, **settings}, default=str)) for name, _, settings in shares
    ]
    drawn = random.Random(seed).choices(recipes, [weight for _, weight, _ in shares], k=count)
    # Entry i is made of seed + i: with a seed of its own the test would have entries of the training rows.
    rows = [_make_row(*recipe, entry, instruction) for entry, recipe in enumerate(drawn)]
    test = rows[:test_size]
    asked = {row["prompt"][0]["content"] for row in test}
    train = [row for row in rows[test_size:] if row["prompt"][0]["content"] not in asked]
    if not train:
        raise DataError(f"--test_size={test_size}: the tests have all questions of --task {' '.join(task)}; lower it")
    return write_splits({"train": train, "test": test}, local_save_dir)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Score the answer with the scorer of the row's task.

    Returns:
        score: the scorer's, 0.0 without an answer; acc: 1.0 where it is 1, else 0.0; unreadable: 1.0 where the scorer
        raised an error, which earns 0.0; pred: the answer, or None.

    Raises:
        ConfigError: the package is not installed.
    """
    dataset, entry = _dataset(extra_info["task"], extra_info["settings"]), ast.literal_eval(extra_info["entry"])
    behind = solution_str.rpartition("####")[1:]
    answer = last_tag_content(solution_str, "answer") or (behind[1].strip() if behind[0] else "")
    score = unreadable = 0.0
    if answer:
        try:
            score = float(dataset.score_answer(answer, entry))
        except Exception:  # noqa: BLE001 - scorers are not made for every text
            unreadable = 1.0
    return {"score": score, "acc": float(score >= 1.0), "unreadable": unreadable, "pred": answer or None}


def check_reward_kwargs() -> None:
    """Check that the package is there, before a run starts; a ConfigError if it is not."""
    if find_spec("reasoning_gym") is None:
        raise ConfigError("the package reasoning-gym is not installed: pip install 'grpo_dist[reasoning-gym]'")


def _share(text: str) -> tuple[str, float, dict[str, Any]]:
    """The name, weight and settings of a task."""
    with suppress(yaml.YAMLError, AttributeError, TypeError, ValueError):
        ((name, settings),) = {text: {}}.items() if text.isidentifier() else yaml.safe_load(text).items()
        weight = settings.pop("weight", 1)
        if 0 < weight < float("inf"):
            return name, weight, settings
    raise DataError(f"--task {text}: must be NAME or '{{NAME: {{weight: 2, SETTING: VALUE}}}}', with a weight above 0")


def _make_row(task: str, settings: str, number: int, instruction: str) -> Row:
    dataset = _dataset(task, settings)
    try:
        entry = dataset[number]
    except Exception as error:
        raise DataError(f"--task {task}, settings {settings}: entry {number}: {error!r}; change them") from error
    question, answer = entry["question"], "" if entry["answer"] is None else str(entry["answer"])
    with np.printoptions(legacy="1.25"):  # a number of numpy looks like any other
        written = repr(entry)
    same = False
    with suppress(ValueError, SyntaxError):
        same = ast.literal_eval(written) == entry
    if not same:
        raise DataError(
            f"--task {task}: entry {number} holds more than numbers, texts and lists of them: {written[:200]}"
        )
    prompt = f"{question}\n\n{instruction}" if instruction else question
    extra: dict[str, Any] = {"task": task, "settings": settings, "entry": written}
    extra["completion"] = f"<answer>{answer}</answer>" if answer else None
    return verl_row(f"reasoning_gym/{task}", prompt, answer, ability="reasoning", **extra)


@lru_cache(maxsize=64)
def _dataset(task: str, settings: str) -> Any:
    check_reward_kwargs()
    from reasoning_gym.factory import DATASETS, create_dataset

    if task == "composite":  # which takes objects, not what YAML has
        raise DataError("--task composite: a mixture is several tasks, --task chain_sum '{maze: {weight: 2}}'")
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
        raise DataError(f"--task {task}: Reasoning Gym has no such task; it has {', '.join(near)}")
    try:
        return create_dataset(task, **json.loads(settings))
    except Exception as error:
        known = ", ".join(field.name for field in fields(DATASETS[task][1]))
        raise DataError(f"--task {task}, settings {settings}: {error}; there are {known}") from error
