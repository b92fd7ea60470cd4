from collections.abc import Callable
from pathlib import Path

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


def load(functions: list) -> RewardFunction:
    return load_reward_function(PATH, "compute_score", {"functions": functions})


def score(functions: list, text: str = TEXT) -> dict:
    reward = load(functions)
    return reward.function("d", text, "4", {}, **reward.reward_kwargs)


def test_the_sum_and_its_parts(tmp_path: Path) -> None:
    """Graded 1.5 * 2, four tags at 0.2 * 0.5, 10 at 0.1."""
    (tmp_path / "own.py").write_text(
        "def length(data_source, solution_str, ground_truth, extra_info):\n    return 10\n"
    )
    result = score(
        [
            {"path": GRADED, "weight": 2, "reward_kwargs": {"tag": "answer"}},
            {"path": XML_TAGS, "weight": 0.5},
            {"path": str(tmp_path / "own.py"), "name": "length", "weight": 0.1, "label": "long"},
        ]
    )
    assert result == pytest.approx(
        {"score": 3.0 + 0.4 + 1.0, "acc": 1.0, "graded": 1.5, "graded.acc": 1.0, "xml_tags": 0.8, "long": 10.0}
    )


def test_a_text_of_a_function_has_its_label(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def judge(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1, 'feedback': 'too long'}\n"
    )
    (result,) = score_group(
        load([{"path": str(tmp_path / "judge.py"), "name": "judge"}]), [Sample(TEXT, "d", "4", {}, MESSAGES)]
    )
    assert not isinstance(result, Failure)
    assert result.texts == {"judge.feedback": "too long"}


@pytest.mark.parametrize(
    ("functions", "parts"),
    [
        ([], ["no function"]),
        ([{"name": "f"}], ["functions[0]", "path"]),
        ([{"path": "x.py", "wieght": 1}], ["functions[0]", "'wieght'"]),
        ([{"path": "nowhere.py"}], ["import", "nowhere.py"]),
        ([{"path": GRADED, "weight": "2"}], ["weight='2'", "number"]),
        ([{"path": GRADED}] * 2, ["second", "'graded'"]),
        *(
            ([{"path": GRADED, "label": label}], ["component", f"'{label}'"])
            for label in ("score", "pred", "step_scores", "overlong_penalty")
        ),
    ],
)
def test_mistakes_are_told_before_a_run(functions: list, parts: list[str]) -> None:
    with refuses(ConfigError, *parts):
        load(functions)


MIXED = """
import asyncio
def right(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "acc": float(solution_str == ground_truth)}
def short(data_sources, solution_strs, ground_truths, extra_infos):
    return [-len(text) / 10 for text in solution_strs]
def polite(completions, level, **columns):
    return [None if text.isdigit() else float(each) for text, each in zip(completions, level)]
async def asked(data_source, solution_str, ground_truth, extra_info, bonus):
    await asyncio.sleep(0)
    return bonus
def none(completions):
    return [None for _ in completions]
def broken(completions):
    return [1.0]
def fails(data_source, solution_str, ground_truth, extra_info):
    return 1 / (solution_str != "4")
class Judge:
    def __call__(self, completions, **columns):
        return [0.5 for _ in completions]
judge = Judge()
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Callable[..., list]:
    """Scores the responses "4" and "please" to a prompt by functions of the file, with their weights."""
    (tmp_path / "mixed.py").write_text(MIXED)

    def group(*names: str, **weights: float) -> list:
        entries = [{"path": f"{tmp_path}/mixed.py:{name}", "weight": weights.get(name, 1.0)} for name in names]
        for entry in entries:
            if entry["path"].endswith(":asked"):
                entry["reward_kwargs"] = {"bonus": 2.0}
        samples = [Sample(text, "d", "4", {}, MESSAGES, {"level": 3}, is_text=True) for text in ("4", "please")]
        return list(score_group(load(entries), samples))

    return group


def test_functions_of_all_forms_add_up(mixed: Callable[..., list]) -> None:
    """ "4": 1 - 0.5 * 0.1 + 2 * 2 + 0.5, and polite does not apply; "please": 0 - 0.5 * 0.6 + 0.1 * 3 + 2 * 2 + 0.5."""
    first, second = mixed("right", "short", "polite", "asked", "judge", short=0.5, polite=0.1, asked=2.0)
    assert first.score == pytest.approx(1 - 0.05 + 4 + 0.5)
    assert first.extra == pytest.approx(
        {"right": 1.0, "right.acc": 1.0, "acc": 1.0, "short": -0.1, "asked": 2.0, "judge": 0.5}
    )
    assert second.score == pytest.approx(0 - 0.3 + 0.3 + 4 + 0.5)
    assert second.extra["polite"] == 3.0


def test_one_after_the_other_only_if_all_are(tmp_path: Path, mixed: Callable[..., list]) -> None:
    file = f"{tmp_path}/mixed.py"
    assert takes_one(load([{"path": f"{file}:right"}, {"path": f"{file}:fails"}]))
    assert not takes_one(load([{"path": f"{file}:right"}, {"path": f"{file}:short"}]))
    assert not takes_one(load([{"path": f"{file}:right"}, {"path": f"{file}:asked", "reward_kwargs": {"bonus": 1}}]))


def test_a_response_to_which_no_function_applies_has_failed(mixed: Callable[..., list]) -> None:
    first, second = mixed("polite", "none")
    assert isinstance(first, Failure)
    says(first.text, "mixed.py:polite", "mixed.py:none", "None", "finite", "'4'")
    assert second.score == 3.0, "only the response that nothing applies to"


def test_a_function_that_fails_takes_its_response_with_it(mixed: Callable[..., list]) -> None:
    first, second = mixed("right", "fails")
    says(first.text, "mixed.py:fails", "ZeroDivisionError")
    assert second.score == 1.0
    first, second = mixed("right", "broken")
    says(first.text, "mixed.py:broken", "1 scores", "2 responses")
    assert first == second, "a function of a whole group fails on all of it"


def test_what_its_functions_need_of_a_row(tmp_path: Path, mixed: Callable[..., list]) -> None:
    file = f"{tmp_path}/mixed.py"
    needs = load([{"path": f"{file}:none"}, {"path": f"{file}:polite"}]).needs
    assert needs == RowNeeds(False, frozenset({"level"}), None)
    assert load([{"path": f"{file}:none"}, {"path": f"{file}:right"}]).needs == RowNeeds(True)


def test_a_sum_in_a_sum_is_refused() -> None:
    with refuses(ConfigError, "functions[0]", PATH):
        load([{"path": PATH, "reward_kwargs": {"functions": [{"path": GRADED}]}}])


def test_its_functions_are_the_components() -> None:
    """Not the values beside their scores: graded's `acc` is none."""
    functions = [{"path": GRADED, "weight": 2, "reward_kwargs": {"tag": "answer"}}, {"path": XML_TAGS, "label": "tags"}]
    assert load(functions).components == {"graded": 2.0, "tags": 1.0}
    assert load_reward_function(GRADED, "compute_score", {}).components == {}


def test_a_function_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(data_source, solution_str, ground_truth, extra_info):\n    return None\n")
    with refuses(RewardError, "own.py:f", "finite"):
        score([{"path": str(tmp_path / "own.py"), "name": "f"}])


def test_the_first_answer_found_is_passed_on() -> None:
    functions = [{"path": XML_TAGS}, {"path": "grpo_dist.tasks.gsm8k"}]
    assert score(functions, "#### 5")["pred"] == "5"
    assert "pred" not in score(functions, "none")


def test_no_answer_hides_none_of_a_later_function(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info, pred):\n    return {'score': 0.0, 'pred': pred}\n"
    )
    without = {"path": str(tmp_path / "own.py"), "name": "f", "reward_kwargs": {"pred": ""}}
    assert score([without, {"path": "grpo_dist.tasks.gsm8k"}], "#### 5")["pred"] == "5"
    assert "pred" not in score([without, {"path": "grpo_dist.tasks.competition_math"}], "none")


def test_the_first_accuracy_is_the_whole_ones() -> None:
    """gsm8k finds no number, graded the right one."""
    graded = {"path": GRADED, "reward_kwargs": {"tag": "answer"}}
    strict, tags = {"path": "grpo_dist.tasks.gsm8k"}, {"path": XML_TAGS}
    assert score([tags, graded, strict])["acc"] == 1.0
    assert score([tags, strict, graded])["acc"] == 0.0
    assert score([strict, {**graded, "label": "acc"}])["acc"] == 1.5, "a label of that name is the accuracy"
    assert "acc" not in score([tags])


def test_steps_are_weighed_and_must_be_as_many(tmp_path: Path) -> None:
    text = "def f(data_source, solution_str, ground_truth, extra_info, steps):\n"
    text += "    return {'score': 1.0, 'step_scores': steps}\n"
    (tmp_path / "own.py").write_text(text)

    def judge(label: str, weight: float, steps: list[float]) -> dict:
        path = str(tmp_path / "own.py")
        return {"path": path, "name": "f", "label": label, "weight": weight, "reward_kwargs": {"steps": steps}}

    function = load([judge("a", 1.0, [1.0, 0.0]), judge("b", 0.0, [0.0, 1.0])])
    arguments = {"data_source": "x", "solution_str": "", "ground_truth": "", "extra_info": {}}
    found = score_response(function, **arguments)
    assert (found.score, found.step_scores) == (1.0, (1.0, 0.0))
    assert found.judged_steps == {"a": (1.0, 0.0), "b": (0.0, 1.0)}
    with refuses(RewardError, "a 1", "b 2"):
        score_response(load([judge("a", 1.0, [1.0]), judge("b", 1.0, [1.0, 2.0])]), **arguments)


DECLARED = {"right": 1.0, "short": 0.5}


def test_gdpo_compares_those_declared_with_their_weights() -> None:
    assert chosen_components(None, None, declared=DECLARED, overlong_penalty=False) == DECLARED
    assert chosen_components(None, [2.0, 3.0], declared=DECLARED, overlong_penalty=False) == {"right": 2, "short": 3}


def test_the_overlong_penalty_is_one_more_component() -> None:
    found = chosen_components(None, None, declared=DECLARED, overlong_penalty=True)
    assert found == {"right": 1, "short": 0.5, "overlong_penalty": 1}


def test_gdpo_compares_those_named() -> None:
    """A weight that is not set is the declared one, and 1 for a value that is no component of its own."""
    keys = ["short", "right.acc"]
    assert chosen_components(keys, None, declared=DECLARED, overlong_penalty=False) == {"short": 0.5, "right.acc": 1}
    keys = ["style", "overlong_penalty"]
    assert chosen_components(keys, None, declared={}, overlong_penalty=True) == {"style": 1, "overlong_penalty": 1}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((None, None, {}), (GDPO_KEYS, "grpo_dist.rewards.weighted", "length, style")),
        ((["shrot"], None, DECLARED), (f"{GDPO_KEYS}=shrot", "right, short")),
        ((["right"], [1.0, 2.0], DECLARED), (GDPO_WEIGHTS, "2 weights", "right")),
        ((None, [1.0], DECLARED), (GDPO_WEIGHTS, "right, short")),
    ],
)
def test_mistakes_in_what_gdpo_compares_are_named(arguments: tuple, parts: tuple[str, ...]) -> None:
    """The values that a function returns are told, and not taken: a length is a diagnostic."""
    keys, weights, declared = arguments
    with refuses(ConfigError, *parts):
        chosen_components(
            keys, weights, declared=declared, overlong_penalty=False, returned=["style", "overlong_penalty", "length"]
        )
