"""The weighted sum of several functions, and the components that gdpo compares."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import RewardFunction, load_reward_function, score_response
from grpo_dist.rewards.contract import Failure, RowNeeds, Sample, score_group, takes_one
from grpo_dist.rewards.weighted import GDPO_KEYS, GDPO_WEIGHTS, chosen_components
from tests.messages import refuses, says

PATH = "grpo_dist.rewards.weighted"
EXAMPLES = Path(__file__).parents[2] / "examples" / "rewards"
GRADED, XML_TAGS = (str(EXAMPLES / name) for name in ("graded.py", "xml_tags.py"))
MESSAGES = [{"role": "user", "content": "2 + 2?"}]
TEXT = "<think>2 + 2</think><answer>4.0</answer>"
MIXED = """
import asyncio
def right(data_source, solution_str, ground_truth, extra_info):
    found = float(solution_str == ground_truth)
    return {"score": found, "acc": found, "feedback": "too long"}
def short(data_sources, solution_strs, ground_truths, extra_infos):
    return [-len(text) / 10 for text in solution_strs]
def polite(completions, level, **columns):
    return [None if text.isdigit() else float(each) for text, each in zip(completions, level)]
async def asked(data_source, solution_str, ground_truth, extra_info, bonus=2.0):
    await asyncio.sleep(0)
    return bonus
def none(completions):
    return [None for _ in completions]
def broken(completions):
    return [1.0]
def fails(data_source, solution_str, ground_truth, extra_info):
    return 1 / (solution_str != "4")
def returns(data_source, solution_str, ground_truth, extra_info, **values):
    return {"score": 1.0, **values}
class Judge:
    def __call__(self, completions, **columns):
        return [0.5 for _ in completions]
judge = Judge()
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Callable[..., dict]:
    """An entry for a function of the file."""
    (tmp_path / "mixed.py").write_text(MIXED)

    def entry(name: str, weight: float = 1.0, **more: Any) -> dict:
        return {"path": f"{tmp_path}/mixed.py:{name}".removesuffix(":"), "weight": weight, **more}

    return entry


def load(functions: list) -> RewardFunction:
    return load_reward_function(PATH, "compute_score", {"functions": functions})


def score(functions: list, text: str = TEXT) -> dict:
    reward = load(functions)
    return reward.function("d", text, "4", {}, **reward.reward_kwargs)


def group(*functions: dict) -> list:
    """Scores the responses "4" and "please" to a prompt."""
    samples = [Sample(text, "d", "4", {}, MESSAGES, {"level": 3}, is_text=True) for text in ("4", "please")]
    return list(score_group(load(list(functions)), samples))


def test_the_sum_and_its_parts(mixed: Callable[..., dict]) -> None:
    """Graded 1.5 * 2, four tags at 0.2 * 0.5, 10 at 0.1; the components are the scores, not graded's `acc`."""
    functions = [
        {"path": GRADED, "weight": 2, "reward_kwargs": {"tag": "answer"}},
        {"path": XML_TAGS, "weight": 0.5},
        {**mixed("", 0.1), "name": "returns", "label": "long", "reward_kwargs": {"score": 10}},
    ]
    assert score(functions) == pytest.approx(
        {"score": 3.0 + 0.4 + 1.0, "acc": 1.0, "graded": 1.5, "graded.acc": 1.0, "xml_tags": 0.8, "long": 10.0}
    )
    assert load(functions).components == {"graded": 2.0, "xml_tags": 0.5, "long": 0.1}
    assert load_reward_function(GRADED, "compute_score", {}).components == {}


RESERVED = ("score", "pred", "step_scores", "overlong_penalty")


def test_mistakes_are_told_before_a_run() -> None:
    for functions, parts in (
        ([], ["no function"]),
        ([{"name": "f"}], ["functions[0]", "path"]),
        ([{"path": "x.py", "wieght": 1}], ["functions[0]", "'wieght'"]),
        ([{"path": "nowhere.py"}], ["import", "nowhere.py"]),
        ([{"path": GRADED, "weight": "2"}], ["weight='2'", "number"]),
        ([{"path": GRADED}] * 2, ["second", "'graded'"]),
        ([{"path": PATH, "reward_kwargs": {"functions": [{"path": GRADED}]}}], ["functions[0]", PATH]),
        *(([{"path": GRADED, "label": label}], ["component", f"'{label}'"]) for label in RESERVED),
    ):
        with refuses(ConfigError, *parts):
            load(functions)


def test_functions_of_all_forms_add_up(mixed: Callable[..., dict]) -> None:
    weights = {"right": 1.0, "short": 0.5, "polite": 0.1, "asked": 2.0, "judge": 1.0}
    first, second = group(*(mixed(name, weight) for name, weight in weights.items()))
    parts = {"right": 1.0, "right.acc": 1.0, "acc": 1.0, "short": -0.1, "asked": 2.0, "judge": 0.5}  # polite abstains
    assert (first.score, first.extra) == (pytest.approx(1 - 0.05 + 4 + 0.5), pytest.approx(parts))
    assert first.texts == {"right.feedback": "too long"}
    assert second.score == pytest.approx(0 - 0.3 + 0.3 + 4 + 0.5)
    assert second.extra["polite"] == 3.0


def test_what_its_functions_need_of_a_row_and_when_they_come_one_after_the_other(mixed: Callable[..., dict]) -> None:
    assert load([mixed("none"), mixed("polite")]).needs == RowNeeds(False, frozenset({"level"}), None)
    assert load([mixed("none"), mixed("right")]).needs == RowNeeds(True)
    assert takes_one(load([mixed("right"), mixed("fails")]))
    assert not takes_one(load([mixed("right"), mixed("short")]))
    assert not takes_one(load([mixed("right"), mixed("asked")]))


def test_a_function_that_fails_takes_its_response_with_it(mixed: Callable[..., dict]) -> None:
    first, second = group(mixed("polite"), mixed("none"))
    assert isinstance(first, Failure)
    says(first.text, "mixed.py:polite", "mixed.py:none", "None", "'4'")
    assert (first.abstained, second.score) == (True, 3.0)
    first, second = group(mixed("right"), mixed("fails"))
    assert not first.abstained
    says(first.text, "mixed.py:fails", "ZeroDivisionError")
    assert second.score == 1.0
    first, second = group(mixed("right"), mixed("broken"))
    says(first.text, "mixed.py:broken", "1 scores", "2 responses")
    assert first == second, "a function of a whole group fails on all of it"
    with refuses(RewardError, "mixed.py:fails", "ZeroDivisionError"):
        score([mixed("fails")], "4")


def test_the_first_answer_and_the_first_accuracy_are_passed_on(mixed: Callable[..., dict]) -> None:
    graded, tags = {"path": GRADED, "reward_kwargs": {"tag": "answer"}}, {"path": XML_TAGS}
    strict = {"path": "grpo_dist.tasks.gsm8k"}
    without = mixed("returns", reward_kwargs={"pred": ""})
    assert score([tags, without, strict], "#### 5")["pred"] == "5"
    assert "pred" not in score([tags, without, strict], "none")
    assert score([tags, graded, strict])["acc"] == 1.0
    assert score([tags, strict, graded])["acc"] == 0.0
    assert score([strict, {**graded, "label": "acc"}])["acc"] == 1.5, "a label of that name is the accuracy"
    assert "acc" not in score([tags])


def test_steps_are_weighed_and_must_be_as_many(mixed: Callable[..., dict]) -> None:
    def judge(label: str, weight: float, steps: list[float]) -> dict:
        return mixed("returns", weight, label=label, reward_kwargs={"step_scores": steps})

    row: dict[str, Any] = {"data_source": "x", "solution_str": "", "ground_truth": "", "extra_info": {}}
    found = score_response(load([judge("a", 1.0, [1.0, 0.0]), judge("b", 0.0, [0.0, 1.0])]), **row)
    assert (found.score, found.step_scores) == (1.0, (1.0, 0.0))
    assert found.judged_steps == {"a": (1.0, 0.0), "b": (0.0, 1.0)}
    with refuses(RewardError, "a 1", "b 2"):
        score_response(load([judge("a", 1.0, [1.0]), judge("b", 1.0, [1.0, 2.0])]), **row)


DECLARED = {"right": 1.0, "short": 0.5}


def test_gdpo_compares_those_named_or_all_declared() -> None:
    """A weight that is not set is the declared one, and 1 for a value that is no component of its own."""
    for keys, weights, declared, expected in (
        (None, None, DECLARED, {**DECLARED, "overlong_penalty": 1}),
        (None, [2.0, 3.0, 4.0], DECLARED, {"right": 2, "short": 3, "overlong_penalty": 4}),
        (["short", "right.acc"], None, DECLARED, {"short": 0.5, "right.acc": 1}),
        (["style", "overlong_penalty"], None, {}, {"style": 1, "overlong_penalty": 1}),
    ):
        assert chosen_components(keys, weights, declared=declared, overlong_penalty=True) == expected
        assert chosen_components(None, None, declared=DECLARED, overlong_penalty=False) == DECLARED


def test_mistakes_in_what_gdpo_compares_are_named() -> None:
    """The values that a function returns are told, and not taken: a length is a diagnostic."""
    for arguments, parts in (
        ((None, None, {}), (GDPO_KEYS, "grpo_dist.rewards.weighted", "length, style")),
        ((["shrot"], None, DECLARED), (f"{GDPO_KEYS}=shrot", "right, short")),
        ((["right"], [1.0, 2.0], DECLARED), (GDPO_WEIGHTS, "2 weights", "right")),
        ((None, [1.0], DECLARED), (GDPO_WEIGHTS, "right, short")),
    ):
        keys, weights, declared = arguments
        returned = ["style", "overlong_penalty", "length"]
        with refuses(ConfigError, *parts):
            chosen_components(keys, weights, declared=declared, overlong_penalty=False, returned=returned)
