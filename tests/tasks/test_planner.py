"""Plans of {agent, task} steps, with values worked out by hand."""

from __future__ import annotations

import json

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.rewards import load_reward_function
from grpo_dist.tasks.planner import WEIGHTS, best_alignment, compute_score, token_f1
from tests.messages import refuses
from tests.rewards.scoring import scored

TRUTH = [
    {"agent": "search", "task": "find the population of Kenya"},
    {"agent": "code", "task": "plot it"},
    {"agent": "writer", "task": "write the report"},
]


def score(plan: object, truth: object = TRUTH, extra_info: dict | None = None, **kwargs: object) -> dict[str, float]:
    text = plan if isinstance(plan, str) else json.dumps(plan)
    return compute_score("plans", text, truth, extra_info or {}, **kwargs)


PERFECT = {"score": 1.0, **dict.fromkeys(WEIGHTS, 1.0), "acc": 1.0}
NOTHING = {"score": 0.0, **dict.fromkeys(WEIGHTS, 0.0), "acc": 0.0}


def test_the_truth_earns_one() -> None:
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)
    assert score(TRUTH) == pytest.approx(PERFECT)
    assert score(TRUTH, json.dumps(TRUTH)) == pytest.approx(PERFECT)  # as JSON text
    assert score([{**step, "why": "extra fields are free"} for step in TRUTH]) == pytest.approx(PERFECT)


@pytest.mark.parametrize(
    "text",
    [
        "I plan:\n```json\n{}\n```\ndone",
        "```\n{}\n```",
        "Plan: {} and that is [all",
        "```python\nprint([1])\n```\n```json\n{}\n```",
        "```json\n[]\n```\nNo, better:\n```json\n{}\n```",
    ],
)
def test_where_a_plan_may_stand(text: str) -> None:
    assert score(text.replace("{}", json.dumps(TRUTH)))["score"] == pytest.approx(1.0)


def test_in_a_tag() -> None:
    text = f"<think>[1]</think><plan>{json.dumps(TRUTH)}</plan>[2]"
    assert score(text, tag="plan")["score"] == pytest.approx(1.0)
    assert score(text, tag="answer") == NOTHING
    assert score(text) == NOTHING  # from the first [ to the last ] is no JSON


@pytest.mark.parametrize(
    "text", ["", "no plan", "[", "]", "][", "[{]", "{'agent': 'a'}", "[" * 100_000, "null", "[NaN,]"]
)
def test_no_json_earns_nothing(text: str) -> None:
    assert score(text) == NOTHING


def test_an_empty_plan_is_only_json() -> None:
    assert score([]) == {**NOTHING, "json": 1.0, "score": pytest.approx(0.1)}


def test_swapped_steps() -> None:
    found = score([TRUTH[1], TRUTH[0], TRUTH[2]])
    assert found["order"] == pytest.approx(2 / 3)  # the longest common subsequence has two agents
    assert found["tasks"] == pytest.approx(2 / 3)
    assert (found["schema"], found["agents"], found["steps"], found["acc"]) == (1.0, 1.0, 1.0, 0.0)
    assert found["score"] == pytest.approx(0.1 * 4 + 0.3 * 2 / 3 * 2)


def test_a_missing_and_a_superfluous_step() -> None:
    shorter = score(TRUTH[:2])
    assert [shorter[part] for part in ("order", "tasks", "steps")] == pytest.approx([2 / 3] * 3)
    longer = score([*TRUTH, TRUTH[0]])
    assert [longer[part] for part in ("order", "tasks", "steps")] == pytest.approx([3 / 4] * 3)
    assert longer["score"] == pytest.approx(0.3 + 0.7 * 3 / 4)
    assert score(TRUTH * 50)["score"] < 0.4  # no gain from repetition


def test_other_words_for_a_task() -> None:
    found = score([TRUTH[0], {"agent": "code", "task": "Plot a chart"}, TRUTH[2]])
    assert found["tasks"] == pytest.approx((1 + 0.4 + 1) / 3)  # 1 common of 3 and 2 words
    assert (found["order"], found["acc"]) == (1.0, 0.0)


def test_broken_steps() -> None:
    found = score([TRUTH[0], {"agent": "code"}, "writer"])
    assert (found["schema"], found["agents"], found["order"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert found["steps"] == 1.0
    for bad in ({"agent": " ", "task": "t"}, {"agent": 1, "task": "t"}, [], None, {"agent": ["search"], "task": "t"}):
        assert score([bad])["schema"] == 0.0


def test_allowed_agents() -> None:
    plan = [*TRUTH, {"agent": "lawyer", "task": "sue"}]
    assert score(plan)["agents"] == 0.75  # those of the truth
    assert score(plan, agents=["lawyer"])["agents"] == 0.25
    assert score(plan, extra_info={"agents": ["search", "lawyer"]})["agents"] == 0.5
    assert score(plan, extra_info={"agents": ["search"]}, agents=["code", "writer", "lawyer"])["agents"] == 0.75


def test_weights() -> None:
    plan = TRUTH[:2]
    assert score(plan, weights={"order": 3.0})["score"] == pytest.approx(2.0)
    assert score(plan, weights={"json": 1, "steps": 0.5})["score"] == pytest.approx(1 + 1 / 3)


def test_token_f1() -> None:
    assert token_f1("Plot it!", "plot IT") == 1.0
    assert token_f1("a b c", "a") == 0.5
    assert token_f1("a a a", "a") == 0.5
    assert token_f1("", "a") == token_f1("b", "a") == 0.0


def test_best_alignment_pairs_steps_in_order() -> None:
    def same(a: tuple, b: tuple) -> float:
        return float(a == b)

    a, b, c = ("a", "1"), ("b", "1"), ("c", "1")
    assert best_alignment([a, b, c], [a, b, c], same) == 3.0
    assert best_alignment([c, a, b], [a, b, c], same) == 2.0
    assert best_alignment([a, a, a], [a], same) == 1.0
    assert best_alignment([], [a], same) == 0.0


@pytest.mark.parametrize("truth", [None, [], "[]", "{", {}, [{"agent": "a"}], "4", [1]])
def test_a_broken_truth_is_an_error(truth: object) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "agent", "task"):
        score(TRUTH, truth)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"weights": {"ordre": 1}}, ["weights", "'ordre'", "json, schema"]),
        ({"weights": {"order": "much"}}, ["weights.order='much'", "number"]),
        ({"agents": "search"}, ["agents='search'", "list"]),
        ({"agents": []}, ["agents", "list"]),
    ],
)
def test_arguments_are_checked_before_the_run(kwargs: dict, words: list[str]) -> None:
    with refuses(ConfigError, *words):
        load_reward_function("grpo_dist.tasks.planner", "compute_score", kwargs)


def test_the_parts_become_metrics() -> None:
    function = load_reward_function("grpo_dist.tasks.planner", "compute_score", {"agents": ["search"]})
    result = scored(json.dumps(TRUTH), TRUTH, function=function)
    assert result.score == pytest.approx(0.9 + 0.1 / 3)
    assert result.extra.keys() == {*WEIGHTS, "acc"}
