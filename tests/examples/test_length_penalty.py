from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.rewards import load_reward_function, score_response
from tests.messages import refuses

PATH = str(Path(__file__).parents[2] / "examples" / "rewards" / "length_penalty.py")
compute_score = load_attribute(f"{PATH}:compute_score", key="path")
penalty_share = load_attribute(f"{PATH}:penalty_share", key="path")


@pytest.mark.parametrize(
    ("length", "linear", "cosine"),
    [(0, 0.0, 0.0), (10, 0.0, 0.0), (12, 0.25, 0.14644661), (14, 0.5, 0.5), (18, 1.0, 1.0), (99, 1.0, 1.0)],
)
def test_penalty_share(length: int, linear: float, cosine: float) -> None:
    assert penalty_share(length, 10, 18) == linear
    assert penalty_share(length, 10, 18, "cosine") == pytest.approx(cosine)


def test_words_and_characters() -> None:
    assert compute_score("d", "one two  three\n", "", {}, budget=2, limit=4) == {"score": -0.5, "length": 3.0}
    found = compute_score("d", "one two", "", {}, budget=0, limit=7, unit="characters", shape="cosine")
    assert found == {"score": -1.0, "length": 7.0}
    assert str(compute_score("d", "", "", {}, budget=0, limit=1)["score"]) == "0.0"


def test_with_a_reward_by_weighted() -> None:
    penalty = {"path": PATH, "weight": 0.5, "reward_kwargs": {"budget": 2, "limit": 4}}
    function = load_reward_function(
        "grpo_dist.rewards.weighted", "compute_score", {"functions": [{"path": None, "label": "right"}, penalty]}
    )
    arguments = {"data_source": "gsm8k", "ground_truth": "4", "extra_info": {}}
    result = score_response(function, solution_str="so #### 4", **arguments)
    assert result.score == 1.0 - 0.5 * 0.5
    parts = {"right": 1.0, "right.acc": 1.0, "length_penalty": -0.5, "length_penalty.length": 3.0}
    assert result.extra == {"acc": 1.0, **parts}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"limit": 4}, ["missing", "'budget'"]),
        ({"budget": 4, "limit": 4}, ["limit=4", "budget=4"]),
        ({"budget": -1, "limit": 4}, ["budget=-1", "words", "0"]),
        ({"budget": 1.5, "limit": 4}, ["budget=1.5"]),
        ({"budget": 1, "limit": 4, "unit": "tokens"}, ["unit='tokens'", "words, characters"]),
        ({"budget": 1, "limit": 4, "shape": "step"}, ["shape='step'", "linear, cosine"]),
    ],
)
def test_arguments_are_checked_before_the_run(kwargs: dict, words: list[str]) -> None:
    with refuses(ConfigError, *words):
        load_reward_function(PATH, "compute_score", kwargs)
