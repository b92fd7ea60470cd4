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
    assert normalize("-$3, -(4), -.5, - 6, a-7") == "-3 -4 -.5 6 a7"
    assert normalize("well\u2013known \u2212 x") == "wellknown x", "no minus of a number"
    assert normalize("3\u20135") == "3-5"
    assert normalize("a \u2013 b, \u22123", ignore_punctuation=False) == "a \u2013 b, -3"


@pytest.mark.parametrize("minus", ["-", "\u2010", "\u2011", "\u2012", "\u2013", "\u2212", "\ufe63", "\uff0d"])
def test_every_minus_is_a_sign(minus: str) -> None:
    for number in ("3", ".5", "1,000", "\uff13"):
        truth = number.replace("\uff13", "3")
        assert (score(f"{minus}{number}", f"-{truth}"), score(f"{minus}{number}", truth)) == (1.0, 0.0)
        assert score(f"-{number}", f"{minus}{truth}") == 1.0


@pytest.mark.parametrize("ignore_punctuation", [True, False])
def test_a_number_is_found_as_a_whole_whatever_its_signs(ignore_punctuation: bool) -> None:
    """The rules are those of `contains` (test_format.py)."""
    for text, truth, expected in (
        ("It costs 2.5 dollars.", "5", 0.0),
        ("\u00bd of it", "2", 0.0),
        ("\u22125", "5", 1.0),  # as -5: 5 stands in it as a word
        ("\u22125", "-5", 1.0),
        ("10\u22125", "-5", 0.0),
        ("\uff15\uff0e", "5", 1.0),  # full-width
    ):
        assert score(text, truth, mode="contains", ignore_punctuation=ignore_punctuation) == expected, (text, truth)


def test_both_modes() -> None:
    for text, kwargs, expected in (
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
    ):
        assert score(text, **kwargs) == expected


def test_several_accepted_answers_and_numbers() -> None:
    assert score("NYC", ["New York", "NYC"]) == 1.0
    assert score("Boston", ["New York", "NYC"]) == 0.0
    assert score("in New York, I think", ["NYC", "New York"], mode="contains") == 1.0
    assert score("4", 4) == 1.0
    assert score("314", "3.14") == 0.0
    assert score("15", 5, mode="contains") == 0.0


@pytest.mark.parametrize("truth", ["", "...", None, [], ["a", ""], {"answer": "a"}, [["a"]], float("nan")])
def test_a_truth_that_is_no_answer_is_an_error(truth: object) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "no answer"):
        score("anything", truth, mode="contains")


def test_modes_are_checked_before_the_run() -> None:
    with refuses(ConfigError, "reward_kwargs.mode='fuzzy'", "exact, contains"):
        load_reward_function("grpo_dist.rewards.exact_match", "compute_score", {"mode": "fuzzy"})
