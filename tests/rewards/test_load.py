"""Finding the reward function that the config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import RewardFunction, check_data_sources, load_reward_function
from grpo_dist.rewards.contract import RewardResult, RowNeeds, Sample, score_group
from grpo_dist.rewards.load import MOVED, SCORERS
from tests.messages import refuses
from tests.rewards.scoring import scored

SOURCE = """
import os
LIMIT = 3
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str)}
def anything(**arguments):
    return 0.5
def short(solution_str, ground_truth):
    return 1.0
def needy(data_source, solution_str, ground_truth, extra_info, api_key):
    return 1.0
async def later(data_source, solution_str, ground_truth, extra_info):
    return 1.0
def group(prompts, completions):
    return [1.0 for _ in completions]
def named(prompts, completions, ground_truth, a, b, **columns):
    return [1.0 for _ in completions]
def optional(data_source, solution_str, ground_truth=None, extra_info=None):
    return 1.0
def few(completions, answer, level=1, scale=2.0):
    return [1.0 for _ in completions]
def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0 for _ in solution_strs]
class Scorer:
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 0.25
class AsyncScorer:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 0.75
judge, later_judge = Scorer(), AsyncScorer()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_reward.py"
    path.write_text(SOURCE)
    return str(path)


def score(function: RewardFunction, text: str, data_source: str = "mine") -> Any:
    return scored(text, "4", data_source, function=function)


@pytest.mark.parametrize("data_source", ["openai/gsm8k", "gsm8k", "arithmetic"])
def test_no_path_gives_the_built_in_scorer_of_the_data_source(data_source: str) -> None:
    function = load_reward_function(None, "compute_score", {})
    assert score(function, "#### 4", data_source).score == 1.0
    assert score(function, "4", data_source).score == 0.0


@pytest.mark.parametrize("data_source", ["gsm9k", "os:system", "", "gsm8k/", "reasoning_gym"])
def test_unknown_data_source_says_what_to_set(data_source: str) -> None:
    with refuses(ConfigError, repr(data_source), "set custom_reward_function.path") as error:
        score(load_reward_function(None, "compute_score", {}), "#### 4", data_source)
    known = str(error.value).partition("Built-in: ")[2].split(", ")
    assert {"arithmetic", "countdown", "openai/gsm8k", "HuggingFaceH4/MATH-500", "math_dapo"} <= set(known)


def test_check_data_sources_lists_all_unknown() -> None:
    check_data_sources(["gsm8k", "gsm8k", "arithmetic"])
    check_data_sources([])
    with refuses(ConfigError, "'a', 'b'", "custom_reward_function.path"):
        check_data_sources(["b", "gsm8k", "a", "b"])
    with refuses(ConfigError, "'planner'", "custom_reward_function.path", "examples/planner/planner.py"):
        check_data_sources(["planner"])


def test_built_in_scorers_take_no_reward_kwargs() -> None:
    with refuses(ConfigError, "custom_reward_function.reward_kwargs={'x': 1, 'api_key': '***'}"):
        load_reward_function(None, "compute_score", {"x": 1, "api_key": "SECRET123"})


def test_a_bad_ground_truth_is_an_error_not_a_zero() -> None:
    with refuses(RewardError, "ground_truth 'four'", "number"):
        scored("#### 4", "four", "gsm8k")


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_file_with_and_without_reward_kwargs(file: str, prefix: str) -> None:
    plain = load_reward_function(prefix + file, "compute_score", {})
    assert (score(plain, "4").score, score(plain, "five").extra) == (1.0, {"length": 4.0})
    assert plain.name == f"{prefix}{file}:compute_score"
    assert score(load_reward_function(file, "compute_score", {"bonus": 0.5}), "4").score == 1.5
    assert score(load_reward_function(file, "anything", {"any": 1}), "4").score == 0.5


@pytest.mark.parametrize("path", ["grpo_dist.rewards.format", "pkg://grpo_dist.rewards.format"])
def test_a_module(path: str) -> None:
    function = load_reward_function(path, "compute_score", {})
    assert score(function, "<think>x</think><answer>4</answer>").score == 1.0


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_scorer_that_has_moved_says_where_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        load_reward_function(name, "compute_score", {})
    told, _, place = str(error.value).partition("; set custom_reward_function.path=")
    assert told.startswith(f"custom_reward_function.path={name}: ")
    monkeypatch.chdir(Path(__file__).parents[2])
    needed = {"budget": 1, "limit": 2} if name.endswith("length_penalty") else {}
    assert load_reward_function(place, "compute_score", needed).name == f"{place}:compute_score"


@pytest.mark.parametrize(
    ("name", "reward_kwargs", "words"),
    [
        ("compute_scores", {}, ["'compute_scores'", "'compute_score'"]),
        ("LIMIT", {}, ["function", "int"]),
        ("os", {}, ["function", "module"]),
        ("Scorer", {}, ["function", "class", "object"]),
        ("short", {}, ["short(solution_str, ground_truth)", "keyword argument"]),
        ("needy", {}, ["missing", "'api_key'"]),
        ("compute_score", {"api_key": "SECRET123"}, ["reward_kwargs={'api_key': '***'}", " 'api_key'"]),
        ("compute_score", {"bonsu": 1}, ["reward_kwargs={'bonsu': 1}", " 'bonsu'"]),
    ],
)
def test_functions_that_cannot_be_called(file: str, name: str, reward_kwargs: dict, words: list[str]) -> None:
    with refuses(ConfigError, f"custom_reward_function.path/name={file}:{name}", *words):
        load_reward_function(file, name, reward_kwargs)
    assert load_reward_function(file, "needy", {"api_key": "k"}).reward_kwargs == {"api_key": "k"}


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("def declare_components(): return {'right': 1}", ["TypeError:", "'bonus'"]),
        ("def declare_components(**kwargs): return ['right']", ["['right']", "dict"]),
        ("def declare_components(**kwargs): return {'right': 'high'}", ["finite numbers"]),
        ("def declare_components(**kwargs): return {'right': float('nan')}", ["finite numbers"]),
        ("def declare_components(**kwargs): return {'right': True}", ["finite numbers"]),
        ("def declare_components(**kwargs): return {'score': 1}", ["component", "'score'"]),
    ],
)
def test_components_that_cannot_be_declared(tmp_path: Path, hook: str, words: list[str]) -> None:
    file = tmp_path / "mine.py"
    function = "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus): return 0"
    file.write_text(f"{function}\n{hook}\n")
    with refuses(ConfigError, "custom_reward_function.path", *words):
        load_reward_function(str(file), "compute_score", {"bonus": 1})


def test_files_that_cannot_be_imported(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    for path, words in [
        (str(tmp_path / "gone.py"), "no file"),
        (str(broken), "SyntaxError"),
        ("no_such_package.rewards", "ModuleNotFoundError"),
    ]:
        with refuses(ConfigError, f"custom_reward_function.path/name={path}:compute_score", "import", words):
            load_reward_function(path, "compute_score", {})


def test_an_object_that_can_be_called(file: str) -> None:
    assert score(load_reward_function(f"{file}:judge", "compute_score", {}), "4").score == 0.25
    later = load_reward_function(file, "later_judge", {})
    assert (later.form, later.is_async) == ("response", True)
    (result,) = score_group(later, [Sample("4", "mine", "4", {}, [])])
    assert isinstance(result, RewardResult)
    assert result.score == 0.75


def test_the_name_behind_the_file_is_the_functions(file: str) -> None:
    function = load_reward_function(f"file://{file}:anything", "compute_score", {})
    assert (function.name, score(function, "4").score) == (f"file://{file}:anything", 0.5)
    with refuses(ConfigError, f"{file}:compute_scores", "'compute_score'"):
        load_reward_function(f"{file}:compute_scores", "compute_score", {})


def test_the_form_is_found(file: str) -> None:
    later, batch = (load_reward_function(file, name, {}) for name in ("later", "batch"))
    assert (later.form, later.is_async) == ("response", True)
    assert (batch.form, batch.is_async) == ("batch", False)
    assert load_reward_function(file, "named", {}).form == "trl", "a and b may be entries of extra_info"


@pytest.mark.parametrize(
    ("name", "reward_kwargs", "needs"),
    [
        ("compute_score", {}, RowNeeds()),
        ("batch", {}, RowNeeds()),
        ("optional", {}, RowNeeds(ground_truth=False)),
        ("anything", {}, RowNeeds(ground_truth=False)),
        ("group", {}, RowNeeds(ground_truth=False)),
        ("named", {}, RowNeeds(needed=frozenset("ab"), taken=None)),
        ("named", {"b": 1}, RowNeeds(needed=frozenset("a"), taken=None)),
        ("few", {"scale": 1}, RowNeeds(False, frozenset({"answer"}), frozenset({"answer", "level"}))),
    ],
)
def test_what_a_function_reads_of_a_row(file: str, name: str, reward_kwargs: dict, needs: RowNeeds) -> None:
    assert load_reward_function(file, name, reward_kwargs).needs == needs


@pytest.mark.parametrize("data_source", sorted(SCORERS.keys() - {"reasoning_gym/"}))  # tasks/test_reasoning_gym.py
def test_every_built_in_scorer_says_whether_the_answer_is_right(data_source: str) -> None:
    """What dynamic sampling (recipe dapo) and validation go by, whatever the scale of the scores."""
    number = ("4", r"\boxed{4} #### 4", r"\boxed{5} #### 5")
    special = {"countdown": ({"target": 4, "numbers": [2, 2]}, "<answer>2 + 2</answer>", "<answer>2 - 2</answer>")}
    truth, *answers = special.get(data_source, number)
    assert [scored(answer, truth, data_source).extra["acc"] for answer in answers] == [1.0, 0.0]
