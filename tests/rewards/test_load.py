"""Finding the reward function that the config names, and the built-in ones."""

from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import OPTIONAL_FUNCTION, REWARD_MODEL_FUNCTION
from grpo_dist.rewards import RewardResult, check_data_sources, load_reward_function
from grpo_dist.rewards.contract import RowNeeds, Sample, score_group
from grpo_dist.rewards.load import MOVED, SCORERS
from tests.messages import refuses
from tests.rewards.scoring import scored

REPOSITORY = Path(__file__).parents[2]
SOURCE = """
import os
LIMIT = 3
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str)}
def anything(**arguments):
    return 0.5
def short(solution_str, ground_truth):
    return 1.0
def positional(data_source, solution_str, ground_truth, extra_info, /):
    return 1.0
def needy(data_source, solution_str, ground_truth, extra_info, api_key):
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


def by(path: str, text: str, name: str = "compute_score", **reward_kwargs: Any) -> RewardResult:
    return scored(text, "4", function=load_reward_function(path, name, reward_kwargs))


@pytest.mark.parametrize("data_source", ["gsm9k", "os:system", "", "gsm8k/", "reasoning_gym"])
def test_unknown_data_source_says_what_to_set(data_source: str) -> None:
    with refuses(ConfigError, repr(data_source), "set custom_reward_function.path") as error:
        scored("#### 4", "4", data_source)
    known = str(error.value).partition("Built-in: ")[2].split(", ")
    assert {"arithmetic", "countdown", "openai/gsm8k", "HuggingFaceH4/MATH-500", "math_dapo"} <= set(known)


def test_check_data_sources_lists_all_unknown() -> None:
    check_data_sources(["gsm8k", "gsm8k", "arithmetic"])
    with refuses(ConfigError, "'a', 'b'", "custom_reward_function.path"):
        check_data_sources(["b", "gsm8k", "a", "b"])
    with refuses(ConfigError, "'planner'", "custom_reward_function.path", "examples/planner/planner.py"):
        check_data_sources(["planner"])


def test_built_in_scorers_take_no_reward_kwargs() -> None:
    with refuses(ConfigError, "custom_reward_function.reward_kwargs={'x': 1, 'api_key': '***'}"):
        load_reward_function(None, "compute_score", {"x": 1, "api_key": "SECRET123"})


def test_files_modules_and_objects_by_every_way_of_naming_them(file: str) -> None:
    assert by(f"file://{file}", "4").score == 1.0
    assert by(file, "five").extra == {"length": 4.0}
    assert by(file, "4", bonus=0.5).score == 1.5
    assert by(f"file://{file}:anything", "4", any=1).score == 0.5, "the name behind the file is the function's"
    assert by(f"{file}:judge", "4").score == 0.25
    for path in ("grpo_dist.rewards.format", "pkg://grpo_dist.rewards.format"):
        assert by(path, "<think>x</think><answer>4</answer>").score == 1.0
    names = [load_reward_function(path, "compute_score", {}).name for path in (file, f"file://{file}:anything")]
    assert names == [f"{file}:compute_score", f"file://{file}:anything"]
    with refuses(ConfigError, f"{file}:compute_scores", "'compute_score'"):
        load_reward_function(f"{file}:compute_scores", "compute_score", {})


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_scorer_that_has_moved_says_where_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        load_reward_function(name, "compute_score", {})
    told, _, place = str(error.value).partition("; set custom_reward_function.path=")
    assert told.startswith(f"custom_reward_function.path={name}: ")
    monkeypatch.chdir(REPOSITORY)
    needed = {"budget": 1, "limit": 2} if name.endswith("length_penalty") else {}
    assert load_reward_function(place, "compute_score", needed).name == f"{place}:compute_score"


def test_functions_that_cannot_be_called(file: str) -> None:
    for name, reward_kwargs, words in (
        ("compute_scores", {}, ["'compute_scores'", "'compute_score'"]),
        ("LIMIT", {}, ["function", "int"]),
        ("os", {}, ["function", "module"]),
        ("Scorer", {}, ["function", "class", "object"]),
        ("short", {}, ["short(solution_str, ground_truth)", "keyword argument"]),
        ("positional", {}, ["positional"]),
        ("needy", {}, ["missing", "'api_key'"]),
        ("compute_score", {"api_key": "SECRET123"}, ["reward_kwargs={'api_key': '***'}", " 'api_key'"]),
        ("compute_score", {"bonsu": 1}, ["reward_kwargs={'bonsu': 1}", " 'bonsu'"]),
    ):
        with refuses(ConfigError, f"custom_reward_function.path/name={file}:{name}", *words):
            load_reward_function(file, name, reward_kwargs)
    assert load_reward_function(file, "needy", {"api_key": "k"}).reward_kwargs == {"api_key": "k"}


def test_components_that_cannot_be_declared(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    function = "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus): return 0"
    for hook, words in (
        ("def declare_components(): return {'right': 1}", ["TypeError:", "'bonus'"]),
        ("def declare_components(**kwargs): return ['right']", ["['right']", "dict"]),
        ("def declare_components(**kwargs): return {'right': 'high'}", ["finite numbers"]),
        ("def declare_components(**kwargs): return {'right': float('nan')}", ["finite numbers"]),
        ("def declare_components(**kwargs): return {'right': True}", ["finite numbers"]),
        ("def declare_components(**kwargs): return {'score': 1}", ["component", "'score'"]),
    ):
        file.write_text(f"{function}\n{hook}\n")
        with refuses(ConfigError, "custom_reward_function.path", *words):
            load_reward_function(str(file), "compute_score", {"bonus": 1})


def test_the_form_is_found(file: str) -> None:
    later, batch = (load_reward_function(file, name, {}) for name in ("later_judge", "batch"))
    assert (later.form, later.is_async) == ("response", True)
    assert list(score_group(later, [Sample("4", "mine", "4", {}, [])])) == [RewardResult(0.75, {})]
    assert (batch.form, batch.is_async) == ("batch", False)
    assert load_reward_function(file, "named", {}).form == "trl", "a and b may be entries of extra_info"


def test_what_a_function_reads_of_a_row(file: str) -> None:
    for name, reward_kwargs, needs in (
        ("compute_score", {}, RowNeeds()),
        ("batch", {}, RowNeeds()),
        ("optional", {}, RowNeeds(ground_truth=False)),
        ("anything", {}, RowNeeds(ground_truth=False)),
        ("group", {}, RowNeeds(ground_truth=False)),
        ("named", {"b": 1}, RowNeeds(needed=frozenset("a"), taken=None)),
        ("few", {"scale": 1}, RowNeeds(False, frozenset({"answer"}), frozenset({"answer", "level"}))),
    ):
        assert load_reward_function(file, name, reward_kwargs).needs == needs


# --- the built-in ones -----------------------------------------------------------------------------------------------
BOXED = ("4", r"\boxed{4} #### 4", r"\boxed{5} #### 5")
LETTERS = ("B", "Answer: B", "Answer: C")
COUNTDOWN = ({"target": 4, "numbers": [2, 2]}, "<answer>2 + 2</answer>", "<answer>2 - 2</answer>")


def test_every_scorer_says_whether_the_answer_is_right_and_votes_for_none_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What dynamic sampling (recipe dapo), validation and maj@n go by, whatever the scale of the scores."""
    for data_source, path in (
        *((source, None) for source in sorted(SCORERS.keys() - {"reasoning_gym/"})),  # tasks/test_reasoning_gym.py
        ("arithmetic", "grpo_dist.tasks.worked_sums"),
        ("letters", "examples/rewards/multiple_choice.py"),
    ):
        monkeypatch.chdir(REPOSITORY)
        truth, *answers = {"countdown": COUNTDOWN, "letters": LETTERS}.get(data_source, BOXED)
        function = load_reward_function(path, "compute_score", {})
        results = [scored(text, truth, data_source, function=function) for text in (*answers, "I am thinking ...")]
        assert [result.extra["acc"] for result in results] == [1.0, 0.0, 0.0]
        assert results[2].pred is None


def test_the_optional_one_scores_what_can_be_scored() -> None:
    function = load_reward_function(OPTIONAL_FUNCTION, "compute_score", {})
    for data_source, truth, score, acc in (
        ("arithmetic", "3", 1.0, 1.0),
        ("arithmetic", "4", 0.0, 0.0),
        ("arithmetic", None, 0.0, None),
        ("another", "3", 0.0, None),
    ):
        result = scored("#### 3", truth, data_source, function=function)
        assert (result.score, result.extra.get("acc")) == (score, acc)


def test_the_score_of_a_reward_model_alone_and_beside_a_rule() -> None:
    """2 * (-1.25) + 0.5 * 1. For steps the rule judges the whole response, which counts at its last: 2 * s + 0.5."""
    parts = [{"path": REWARD_MODEL_FUNCTION, "weight": 2.0}, {"path": None, "weight": 0.5, "label": "rule"}]
    alone = load_reward_function(REWARD_MODEL_FUNCTION, "compute_score", {})
    weighted = load_reward_function("grpo_dist.rewards.weighted", "compute_score", {"functions": parts})

    def by(function: Any, **extra_info: Any) -> RewardResult:
        return scored("#### 3", "3", "arithmetic", extra_info, function)

    assert by(alone, rm_score=-1.25).score == -1.25
    found = by(weighted, rm_score=-1.25)
    assert (found.score, found.extra["reward_model"], found.extra["rule"]) == (-2.0, -1.25, 1.0)
    steps = {"rm_score": 0.25, "rm_step_scores": [0.5, 0.25]}
    found = by(alone, **steps)
    assert (found.score, found.step_scores, found.judged_steps) == (0.25, (0.5, 0.25), {})
    found = by(weighted, **steps)
    assert (found.score, found.step_scores) == (1.0, (1.0, 1.0))
    assert found.judged_steps == {"reward_model": (0.5, 0.25)}
    assert by(alone, rm_score=0.5, rm_step_scores=[]).step_scores == ()
    with refuses(ConfigError, "reward_model.enable=true"):
        by(alone)
