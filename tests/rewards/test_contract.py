"""Calling a reward function of every form: what is accepted, and what every kind of failure says."""

import asyncio
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import RewardFunction, RewardResult, score_response
from grpo_dist.rewards.contract import Sample, form_of, score_group
from grpo_dist.rewards.load import _row_needs
from tests.messages import refuses, says

MESSAGES = [{"role": "user", "content": "2 + 2?"}]
SAMPLES = [Sample(text, "sums", "4", {"index": 7}, MESSAGES) for text in ("4", "five")]


def call(function: Any, text: str = "the response", extra_info: Any = None, **reward_kwargs: Any) -> RewardResult:
    row: dict[str, Any] = {"data_source": "my/data", "ground_truth": "4", "extra_info": extra_info or {}}
    return score_response(RewardFunction("mine.py:score", function, reward_kwargs), solution_str=text, **row)


def returning(value: Any) -> Any:
    return lambda data_source, solution_str, ground_truth, extra_info: value


def results(function: Any, samples: list[Sample] = SAMPLES, **reward_kwargs: Any) -> list[Any]:
    is_async = asyncio.iscoroutinefunction(function)
    return list(score_group(RewardFunction("mine", function, reward_kwargs, form_of(function), is_async), samples))


@pytest.mark.parametrize("returned", [2, True, np.float32(0.5), np.array(2.0), torch.tensor(0.25), {"score": 2}])
def test_numbers_of_every_kind(returned: Any) -> None:
    result = call(returning(returned))
    assert result == RewardResult(float(returned["score"] if isinstance(returned, dict) else returned), {})
    assert type(result.score) is float


def test_numbers_and_texts_beside_the_score_are_kept() -> None:
    returned = {"score": 0.5, "acc": True, "length": np.int64(7), "note": None, "steps": [1, 2], "feedback": "no unit"}
    expected = RewardResult(0.5, {"acc": 1.0, "length": 7.0}, texts={"feedback": "no unit"}, pred="4")
    assert call(returning({**returned, "pred": "4"})) == expected


def test_the_answer_is_text_and_no_metric() -> None:
    for pred, expected in ((12, "12"), (0, "0"), ("nan", "nan")):
        assert call(returning({"score": 0.5, "pred": pred})) == RewardResult(0.5, {}, None, expected)
    for none in (None, "", " \n", math.nan, np.float32("nan")):
        assert call(returning({"score": 0.5, "pred": none})).pred is None


def test_arguments_go_by_keyword_with_reward_kwargs_and_a_copy_of_extra_info() -> None:
    seen = {}

    def score(extra_info: dict, solution_str: str, *, weight: float, **others: Any) -> float:
        seen.update(others, solution_str=solution_str, extra_info=dict(extra_info))
        extra_info["index"] = "changed"
        return weight

    info, row = {"index": 3}, {"data_source": "my/data", "ground_truth": "4"}
    assert call(score, "réponse 両", info, weight=0.75).score == 0.75
    assert seen == {**row, "solution_str": "réponse 両", "extra_info": {"index": 3}}
    assert info == {"index": 3}


def test_nonsense_is_refused_and_shown() -> None:
    for returned, words in (
        (math.nan, ["finite", "'score'", "nan (float)"]),
        (None, ["None (NoneType)"]),
        ("1.0", ["'1.0' (str)"]),
        (np.array([1.0]), ["(ndarray)"]),
        ({"reward": 1.0}, ["without 'score'", "{'reward': 1.0} (dict)"]),
        ({"score": "1"}, ["'score'", "finite", "'1' (str)"]),
        ({"score": 1.0, "acc": math.nan}, ["'acc'", "finite", "nan"]),
    ):
        with refuses(RewardError, "mine.py:score", "data_source='my/data'", "'the response'", *words) as error:
            call(returning(returned))
        assert len(str(error.value)) < 500


def test_an_exception_shows_where_and_for_which_response() -> None:
    def helper(text: str) -> float:
        return float(text)

    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        return helper(solution_str)

    with refuses(RewardError, "mine.py:score", "data_source='my/data'", "ValueError:") as error:
        call(score, "x" * 150 + "y" * 150)
    message = str(error.value)
    says(message, f"'{'x' * 150}{'y' * 50}'...")
    assert "in score\n    return helper(solution_str)" in message
    assert "in helper\n    return float(text)" in message
    assert "rewards/contract.py" not in message
    assert str(pickle.loads(pickle.dumps(error.value))) == message


def test_exits_wrong_arguments_and_deep_recursion_are_errors_and_interrupts_are_none() -> None:
    def deep(**arguments: Any) -> float:
        return deep(**arguments)

    def ending(*, by: BaseException, **arguments: Any) -> float:
        raise by

    with refuses(RewardError, "mine.py:score", "RecursionError") as error:
        call(deep)
    assert len(str(error.value)) < 2000
    with refuses(RewardError, "SystemExit: 3"):
        call(ending, by=SystemExit(3))
    with refuses(RewardError, "TypeError:", "keyword argument"):
        call(lambda text: 1.0)
    with pytest.raises(KeyboardInterrupt):
        call(ending, by=KeyboardInterrupt())


def test_trls_form_gets_the_columns_that_it_takes() -> None:
    rows = [replace(sample, columns={"answer": "4", "level": 2, "question": "?"}) for sample in SAMPLES]

    def correct(completions: list, answer: list, level: int, index: list) -> list[float]:
        assert (level, index) == (3, [7, 7])
        return [float(each[0]["content"] == right) for each, right in zip(completions, answer, strict=True)]

    assert [result.score for result in results(correct, rows, level=3)] == [1, 0]

    def columns(completions: list, **columns: Any) -> list[float]:
        assert columns.pop("extra_info") == [{"index": 7}] * 2
        row = {"answer": "4", "level": 2, "question": "?", "data_source": "sums", "ground_truth": "4", "index": 7}
        assert columns == {name: [value] * 2 for name, value in {"prompts": MESSAGES, **row}.items()}
        return [1.0, 1.0]

    assert [result.score for result in results(columns, rows)] == [1, 1]


def test_trls_form_gets_texts_where_the_prompt_is_a_text() -> None:
    messages = [{"role": "system", "content": "Add."}, *MESSAGES]
    rows = [replace(sample, messages=messages, is_text=True) for sample in SAMPLES]

    async def reward(prompts: list, completions: list) -> list[float]:
        assert prompts == ["2 + 2?", "2 + 2?"]
        await asyncio.sleep(0)
        return [float(len(completion)) for completion in completions]

    assert [result.score for result in results(reward, rows)] == [1, 4]


def test_what_trls_trainer_gives_where_a_function_names_it() -> None:
    """By hand: the metric's two values have the mean 0.5; a score stands above what was logged under its name."""
    rows = [replace(sample, token_ids=[5] * (i + 1), step=6, max_steps=10) for i, sample in enumerate(SAMPLES)]

    def reward(completions: list, completion_ids: list, trainer_state: Any, log_extra: Any, log_metric: Any) -> list:
        log_extra("found", ["four", None])
        log_extra("size", [1, 2.5])
        log_metric("share", 0.25)
        log_metric("share", 0.75)
        log_metric("score", 9)
        progress = trainer_state.global_step / trainer_state.max_steps
        return [progress + len(completion_ids[0]), {"score": len(completion_ids[1]), "own": 3}]

    first, second = results(reward, rows)
    assert (first.score, first.extra, first.texts) == (1.6, {"size": 1, "share": 0.5}, {"found": "four"})
    assert (second.score, second.texts) == (2, {"found": "None"})
    assert second.extra == {"size": 2.5, "share": 0.5, "own": 3}
    assert _row_needs(reward, "trl", {}).needed == frozenset(), "they are no columns of the rows"


def test_what_trls_trainer_gives_is_not_made_up() -> None:
    """Who checks a text has no tokens, the run's length may be unknown, and too few values are told."""
    for function, *told in (
        (lambda completions, trainer_state: [trainer_state.max_steps] * 2, "max_steps"),
        (lambda completions, completion_ids: [0.0] * 2, "completion_ids"),
        (lambda completions, log_extra: log_extra("found", ["four"]), "log_extra"),
        (lambda prompts, completions, **columns: None, "list", "2 responses", "None"),
    ):
        says(results(function)[0].text, *told)


def test_async_calls_overlap_and_fail_alone() -> None:
    """The first call waits for the second one: one after the other they would wait for ever."""
    second = asyncio.Event()

    async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        if solution_str == "4":
            await asyncio.wait_for(second.wait(), 10)
            return 1.0
        second.set()
        raise SystemExit("enough")

    first, failed = results(compute_score)
    assert first.score == 1
    says(failed.text, "SystemExit: enough")


def test_a_mistake_of_the_runs_is_no_failure_of_a_response() -> None:
    def mistaken(**arguments: Any) -> Any:
        raise ConfigError("no scorer")

    async def awaited(**arguments: Any) -> Any:
        raise ConfigError("no scorer")

    functions = [RewardFunction("mine", mistaken, {}, form) for form in ("response", "batch", "trl")]
    for function in (*functions, RewardFunction("mine", awaited, is_async=True)):
        with refuses(ConfigError, "no scorer"):
            list(score_group(function, SAMPLES))
