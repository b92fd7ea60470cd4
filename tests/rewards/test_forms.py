"""Every form of reward function, called for a group of two responses."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.rewards.contract import Failure, RewardFunction, RewardResult, Sample, form_of, score_group
from grpo_dist.rewards.load import _row_needs
from tests.messages import refuses, says

MESSAGES = [{"role": "user", "content": "2 + 2?"}]
SAMPLES = [Sample(text, "sums", "4", {"index": 7}, MESSAGES) for text in ("4", "five")]


def results(function: Any, **reward_kwargs: Any) -> list[Any]:
    is_async = asyncio.iscoroutinefunction(function)
    return list(score_group(RewardFunction("mine", function, reward_kwargs, form_of(function), is_async), SAMPLES))


def scores(function: Any, **reward_kwargs: Any) -> list[float]:
    return [result.score for result in results(function, **reward_kwargs)]


def test_one_response_at_a_time() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict, bonus: int) -> float:
        return bonus * (solution_str == ground_truth)

    assert form_of(compute_score) == "response"
    assert scores(compute_score, bonus=3) == [3, 0]


def test_verls_batch_form() -> None:
    def compute_score(data_sources: list, solution_strs: list, ground_truths: list, extra_infos: list) -> list:
        return [{"score": s == g, "index": e["index"]} for s, g, e in zip(solution_strs, ground_truths, extra_infos)]  # noqa: B905

    assert form_of(compute_score) == "batch"
    assert results(compute_score) == [RewardResult(1, {"index": 7}), RewardResult(0, {"index": 7})]


def test_trls_form() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list, completions: list, index: list, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, index=index)
        return [float(len(completion[0]["content"])) for completion in completions]

    assert form_of(reward) == "trl"
    assert scores(reward) == [1, 4]
    assert seen == {
        "prompts": [MESSAGES, MESSAGES],
        "index": [7, 7],
        "data_source": ["sums", "sums"],
        "ground_truth": ["4", "4"],
        "extra_info": [{"index": 7}, {"index": 7}],
    }


def test_trls_form_gets_the_columns_that_it_takes() -> None:
    """Those of the row, and of extra_info; not those whose name an argument of the config has."""
    rows = [Sample(t, "sums", "4", {"index": 7}, MESSAGES, {"answer": "4", "level": 2, "question": "?"}) for t in "45"]

    def correct(completions: list, answer: list, level: int, index: list) -> list[float]:
        assert (level, index) == (3, [7, 7])
        return [float(each[0]["content"] == right) for each, right in zip(completions, answer, strict=True)]

    function = RewardFunction("mine", correct, {"level": 3}, form_of(correct))
    assert [result.score for result in score_group(function, rows)] == [1, 0]

    def columns(completions: list, **columns: Any) -> list[float]:
        assert columns.pop("extra_info") == [{"index": 7}] * 2
        assert {name: values[0] for name, values in columns.items()} == {
            "prompts": MESSAGES,
            "answer": "4",
            "level": 2,
            "question": "?",
            "data_source": "sums",
            "ground_truth": "4",
            "index": 7,
        }
        return [1.0, 1.0]

    assert [result.score for result in score_group(RewardFunction("all", columns, {}, "trl"), rows)] == [1, 1]


def test_trls_form_gets_texts_where_the_prompt_is_a_text() -> None:
    messages = [{"role": "system", "content": "Add."}, *MESSAGES]
    rows = [Sample(text, "sums", None, {}, messages, is_text=True) for text in ("4", "five")]

    def reward(prompts: list, completions: list) -> list[float]:
        assert prompts == ["2 + 2?", "2 + 2?"]
        return [float(len(completion)) for completion in completions]

    assert [result.score for result in score_group(RewardFunction("mine", reward, {}, "trl"), rows)] == [1, 4]


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

    function = RewardFunction("mine", reward, {}, form_of(reward))
    first, second = score_group(function, rows)
    assert (first.score, first.extra, first.texts) == (1.6, {"size": 1, "share": 0.5}, {"found": "four"})
    assert (second.score, second.texts) == (2, {"found": "None"})
    assert second.extra == {"size": 2.5, "share": 0.5, "own": 3}
    assert _row_needs(reward, "trl", {}).needed == frozenset(), "they are no columns of the rows"


def test_what_trls_trainer_gives_is_not_made_up() -> None:
    """Who checks a text has no tokens, the run's length may be unknown, and too few values are told."""

    def length(completions: list, trainer_state: Any) -> list:
        return [trainer_state.max_steps] * 2

    def tokens(completions: list, completion_ids: list) -> list:
        return [0.0] * 2

    def few(completions: list, log_extra: Any) -> list:
        log_extra("found", ["four"])
        return [0.0] * 2

    for function, name in ((length, "max_steps"), (tokens, "completion_ids"), (few, "log_extra")):
        failure, _ = results(function)
        says(failure.text, name)


def test_async_calls_overlap() -> None:
    """The first call waits for the second one: one after the other they would wait for ever."""
    second = asyncio.Event()

    async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        if solution_str == "4":
            await asyncio.wait_for(second.wait(), 10)
            return 1.0
        second.set()
        return 0.5

    assert scores(compute_score) == [1.0, 0.5]


def test_async_batch() -> None:
    async def reward(completions: list, **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0, 2.0]

    assert scores(reward) == [1.0, 2.0]


def test_one_response_fails_alone() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        return float(int(solution_str))

    first, second = results(compute_score)
    assert first.score == 4
    assert isinstance(second, Failure)
    says(second.text, "mine", "data_source='sums'", "ValueError:", "'five'")
    assert "float(int(solution_str))" in second.text, "the line is shown"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], ["1 scores", "2 responses"]),
        (None, ["list", "2 responses", "None"]),
        (0.5, ["list", "2 responses", 0.5]),
        ([float("nan"), 1.0], ["finite", "nan"]),
        ([{"acc": 1}, 1.0], ["without 'score'"]),
    ],
)
def test_a_batch_function_that_returns_nonsense(returned: Any, words: list[str]) -> None:
    first = results(lambda prompts, completions, **columns: returned)[0]
    assert isinstance(first, Failure)
    says(first.text, *words)


def test_an_async_function_that_raises() -> None:
    async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        if solution_str == "five":
            raise SystemExit("enough")
        return 1.0

    first, second = results(compute_score)
    assert first.score == 1
    says(second.text, "SystemExit: enough")


def test_a_mistake_of_the_runs_is_no_failure_of_a_response() -> None:
    """In every form: no response would ever be scored."""

    def one(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        raise ConfigError("no scorer")

    async def awaited(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        raise ConfigError("no scorer")

    def batch(data_sources: list, solution_strs: list, ground_truths: list, extra_infos: list) -> list:
        raise ConfigError("no scorer")

    for function in (one, awaited, batch):
        with refuses(ConfigError, "no scorer"):
            results(function)
