"""Calling a reward function: what is accepted, and what every kind of failure says."""

from __future__ import annotations

import math
import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import RewardFunction, RewardResult, score_response
from tests.messages import refuses, says


def call(
    function: Any, text: str = "the response", extra_info: dict | None = None, **reward_kwargs: Any
) -> RewardResult:
    return score_response(
        RewardFunction("mine.py:score", function, reward_kwargs),
        data_source="my/data",
        solution_str=text,
        ground_truth="4",
        extra_info=extra_info or {},
    )


def returning(value: Any) -> Any:
    return lambda data_source, solution_str, ground_truth, extra_info: value


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, 1.0),
        (-0.25, -0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (torch.tensor(0.25), 0.25),
        ({"score": 2}, 2.0),
    ],
)
def test_numbers_of_every_kind(returned: Any, expected: float) -> None:
    result = call(returning(returned))
    assert result == RewardResult(expected, {})
    assert type(result.score) is float


def test_extra_numbers_are_kept_and_text_is_left_out() -> None:
    returned = {"score": 0.5, "acc": True, "length": np.int64(7), "note": None, "steps": [1, 2]}
    assert call(returning(returned)) == RewardResult(0.5, {"acc": 1.0, "length": 7.0})


@pytest.mark.parametrize(
    ("pred", "expected"),
    [
        ("12", "12"),
        (12, "12"),
        (0, "0"),
        ("nan", "nan"),
        (None, None),
        ("", None),
        (" \n", None),
        (math.nan, None),
        (np.float32("nan"), None),
    ],
)
def test_the_answer_is_text_and_no_metric(pred: object, expected: str | None) -> None:
    assert call(returning({"score": 0.5, "pred": pred})) == RewardResult(0.5, {}, None, expected)


def test_texts_are_kept_beside_the_numbers() -> None:
    """But for the answer; what is neither is left out."""
    result = call(returning({"score": 1, "feedback": "no unit", "pred": "4", "acc": 1, "steps": ["a"]}))
    assert (result.texts, result.extra) == ({"feedback": "no unit"}, {"acc": 1.0})


def test_arguments_go_by_keyword_with_reward_kwargs_and_a_copy_of_extra_info() -> None:
    seen = {}

    def score(extra_info: dict, solution_str: str, *, weight: float, **others: Any) -> float:
        seen.update(others, solution_str=solution_str, extra_info=dict(extra_info))
        extra_info["index"] = "changed"
        return weight

    info = {"index": 3}
    assert call(score, "réponse 両", info, weight=0.75).score == 0.75
    assert seen == {
        "data_source": "my/data",
        "ground_truth": "4",
        "solution_str": "réponse 両",
        "extra_info": {"index": 3},
    }
    assert info == {"index": 3}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (math.nan, ["finite", "'score'", "nan (float)"]),
        (math.inf, ["inf (float)"]),
        (10**400, ["(int)"]),
        (None, ["None (NoneType)"]),
        ("1.0", ["'1.0' (str)"]),
        ([1.0], ["[1.0] (list)"]),
        ((1.0, {}), ["(tuple)"]),
        (1j, ["(complex)"]),
        (Decimal("1"), ["(Decimal)"]),
        (np.array([1.0]), ["(ndarray)"]),
        (torch.tensor([0.5, 0.5]), ["(Tensor)"]),
        (torch.tensor(math.nan), ["(Tensor)"]),
        ({}, ["without 'score'"]),
        ({"reward": 1.0}, ["without 'score'", "{'reward': 1.0} (dict)"]),
        ({"score": "1"}, ["'score'", "finite", "'1' (str)"]),
        ({"score": None}, ["'score'", "finite", "None"]),
        ({"score": math.nan}, ["'score'", "finite", "nan"]),
        ({"score": {"score": 1}}, ["'score'", "finite"]),
        ({"score": 1.0, "acc": math.nan}, ["'acc'", "finite", "nan"]),
    ],
)
def test_nonsense_is_refused_and_shown(returned: Any, words: list[str]) -> None:
    with refuses(RewardError, "mine.py:score", "data_source='my/data'", "'the response'", *words) as error:
        call(returning(returned))
    assert len(str(error.value)) < 500


def test_an_exception_shows_where_and_for_which_response() -> None:
    def helper(text: str) -> float:
        return float(text)

    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        return helper(solution_str)

    with pytest.raises(RewardError) as error:
        call(score, "x" * 150 + "y" * 150)
    message = str(error.value)
    says(message, "mine.py:score", "data_source='my/data'", "ValueError:", f"'{'x' * 150}{'y' * 50}'...")
    assert "in score\n    return helper(solution_str)" in message
    assert "in helper\n    return float(text)" in message
    assert "rewards/contract.py" not in message
    assert isinstance(error.value.__cause__, ValueError)
    assert str(pickle.loads(pickle.dumps(error.value))) == message


def test_deep_recursion_is_cut_short() -> None:
    def score(**arguments: Any) -> float:
        return score(**arguments)

    with refuses(RewardError, "mine.py:score", "RecursionError") as error:
        call(score)
    assert len(str(error.value)) < 2000


def test_exit_and_wrong_arguments_are_errors_too() -> None:
    def leaving(**arguments: Any) -> float:
        raise SystemExit(3)

    with refuses(RewardError, "SystemExit: 3"):
        call(leaving)
    with refuses(RewardError, "TypeError:", "keyword argument"):
        call(lambda text: 1.0)


def test_interrupts_and_own_errors_pass() -> None:
    def raising(error: BaseException) -> Any:
        def score(**arguments: Any) -> float:
            raise error

        return score

    with pytest.raises(KeyboardInterrupt):
        call(raising(KeyboardInterrupt()))
    with pytest.raises(ConfigError) as error:
        call(raising(ConfigError("as it is")))
    assert str(error.value) == "as it is"


def test_a_coroutine_is_refused() -> None:
    async def score(**arguments: Any) -> float:
        return 1.0

    with pytest.warns(RuntimeWarning, match="awaited"), pytest.raises(RewardError, match=r"\(coroutine\)"):
        call(score)
