import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.rewards import load_reward_function
from grpo_dist.rewards.exact_match import compute_score, normalize
from tests.messages import refuses


def score(text: str, truth: object = "The Louvre", **kwargs: object) -> float:
    result = compute_score("d", text, truth, {}, **kwargs)
    assert result["acc"] == result["score"]
    return result["score"]


def test_normalize() -> None:
    assert normalize(" The  U.S.A., don't!\n") == "the usa dont"
    assert normalize("The End of a day", ignore_articles=True) == "end of day"
    assert normalize("A_b C.", ignore_case=False, ignore_punctuation=False) == "A_b C."
    assert normalize("ﬁne é") == normalize("fine e\u0301")
    assert normalize("-3.5, 1/2, .5, 10:30, 4.") == "-3.5 1/2 .5 10:30 4"  # numbers keep their signs


@pytest.mark.parametrize(
    ("text", "kwargs", "expected"),
    [
        ("the louvre.", {}, 1.0),
        ("Louvre", {}, 0.0),
        ("Louvre", {"ignore_articles": True}, 1.0),
        ("the Louvre", {"ignore_case": False}, 0.0),
        ("The Louvre.", {"ignore_punctuation": False}, 0.0),
        ("It is the Louvre, of course", {}, 0.0),
        ("It is the Louvre, of course", {"mode": "contains"}, 1.0),
        ("the louvres", {"mode": "contains"}, 0.0),  # whole words
        ("<answer>the Louvre</answer>", {"tag": "answer"}, 1.0),
        ("the Louvre", {"tag": "answer"}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_both_modes(text: str, kwargs: dict, expected: float) -> None:
    assert score(text, **kwargs) == expected


def test_several_accepted_answers_and_numbers() -> None:
    assert score("NYC", ["New York", "NYC"]) == 1.0
    assert score("Boston", ["New York", "NYC"]) == 0.0
    assert score("in New York, I think", ["NYC", "New York"], mode="contains") == 1.0
    assert score("4", 4) == 1.0
    assert score("314", "3.14") == 0.0
    assert score("5", "-5") == 0.0
    assert score("it is -5", 5, mode="contains") == 1.0  # 5 stands in it as a word
    assert score("15", 5, mode="contains") == 0.0


@pytest.mark.parametrize("truth", ["", "...", None, [], ["a", ""]])
def test_an_empty_truth_is_an_error(truth: object) -> None:
    with refuses(ValueError, "empty answer"):
        score("anything", truth, mode="contains")


def test_modes_are_checked_before_the_run() -> None:
    with refuses(ConfigError, "reward_kwargs.mode='fuzzy'", "exact, contains"):
        load_reward_function("grpo_dist.rewards.exact_match", "compute_score", {"mode": "fuzzy"})
