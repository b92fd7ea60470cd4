from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import load_reward_function, score_response
from tests.messages import refuses

PATH = "grpo_dist.rewards.weighted"
EXAMPLES = Path(__file__).parents[2] / "examples" / "rewards"
GRADED, XML_TAGS = (str(EXAMPLES / name) for name in ("graded.py", "xml_tags.py"))
TEXT = "<think>2 + 2</think><answer>4.0</answer>"


def load(functions: list) -> object:
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


def test_its_functions_are_the_components() -> None:
    """Not the values beside their scores: graded's `acc` is none."""
    functions = [
        {"path": GRADED, "weight": 2, "reward_kwargs": {"tag": "answer"}},
        {"path": XML_TAGS, "label": "tags"},
    ]
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
