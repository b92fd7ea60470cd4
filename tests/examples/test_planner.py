"""Plans of {agent, task} steps: parts with values worked out by hand; requests, exact plans, the same for a seed."""

import functools
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from grpo_dist.data.training_rows import checked_rows, conversation_row
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.rewards import load_reward_function
from grpo_dist.rewards.format import tag_contents
from tests.messages import refuses, says
from tests.tasks.conftest import prompts_of

FOLDER = Path(__file__).parents[2] / "examples" / "planner"
SCORER = str(FOLDER / "planner.py")
WEIGHTS, compute_score = (load_attribute(f"{SCORER}:{name}", key="path") for name in ("WEIGHTS", "compute_score"))
FORMS, SIZES, TAG, draw_plan, draw_requests, main = (
    load_attribute(f"{FOLDER / 'planner_rows.py'}:{name}", key="path")
    for name in ("FORMS", "SIZES", "TAG", "draw_plan", "draw_requests", "main")
)

TRUTH = [
    {"agent": "search", "task": "find the population of Kenya"},
    {"agent": "code", "task": "plot it"},
    {"agent": "writer", "task": "write the report"},
]


def score(plan: object, truth: object = TRUTH, extra_info: dict | None = None, **kwargs: object) -> dict[str, float]:
    text = plan if isinstance(plan, str) else json.dumps(plan)
    return compute_score("plans", text, truth, extra_info or {}, **kwargs)


PERFECT, NOTHING = (dict.fromkeys(("score", *WEIGHTS, "acc"), value) for value in (1.0, 0.0))


def test_the_truth_earns_one_wherever_it_stands() -> None:
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)
    assert score(TRUTH) == pytest.approx(PERFECT)
    assert score(TRUTH, json.dumps(TRUTH)) == pytest.approx(PERFECT)  # as JSON text
    assert score([{**step, "why": "extra fields are free"} for step in TRUTH]) == pytest.approx(PERFECT)
    for text in (
        "I plan:\n```json\n{}\n```\ndone",
        "```\n{}\n```",
        "Plan: {} and that is [all",
        "```python\nprint([1])\n```\n```json\n{}\n```",
        "```json\n[]\n```\nNo, better:\n```json\n{}\n```",
    ):
        assert score(text.replace("{}", json.dumps(TRUTH)))["score"] == pytest.approx(1.0), text
    tagged = f"<think>[1]</think><plan>{json.dumps(TRUTH)}</plan>[2]"
    assert score(tagged, tag="plan")["score"] == pytest.approx(1.0)
    assert score(tagged, tag="answer") == score(tagged) == NOTHING  # from the first [ to the last ] is no JSON


def test_no_json_earns_nothing_and_an_empty_plan_is_only_json() -> None:
    for text in ("", "no plan", "[", "]", "][", "[{]", "{'agent': 'a'}", "[" * 100_000, "null", "[NaN,]"):
        assert score(text) == NOTHING, text[:20]
    assert score([]) == {**NOTHING, "json": 1.0, "score": pytest.approx(0.1)}


def test_other_steps() -> None:
    """Swapped ones: the longest common subsequence has two agents. No gain from repetition."""
    for plan, share, steps in (
        ([TRUTH[1], TRUTH[0], TRUTH[2]], 2 / 3, 1.0),
        (TRUTH[:2], 2 / 3, 2 / 3),
        ([*TRUTH, TRUTH[0]], 3 / 4, 3 / 4),
    ):
        found = score(plan)
        assert [found[part] for part in ("order", "tasks", "steps", "acc")] == pytest.approx([share, share, steps, 0])
        assert found["score"] == pytest.approx(0.3 + 0.6 * share + 0.1 * steps)
    assert score(TRUTH * 50)["score"] < 0.4
    assert score(TRUTH[:2], weights={"order": 3.0})["score"] == pytest.approx(2.0)
    assert score(TRUTH[:2], weights={"json": 1, "steps": 0.5})["score"] == pytest.approx(1 + 1 / 3)


def test_other_words_for_a_task() -> None:
    assert score([TRUTH[0], {"agent": "code", "task": "PLOT it!"}, TRUTH[2]])["tasks"] == pytest.approx(1.0)
    assert score([TRUTH[0], {"agent": "code", "task": "it it it"}, TRUTH[2]])["tasks"] == pytest.approx((2 + 0.4) / 3)
    found = score([TRUTH[0], {"agent": "code", "task": "Plot a chart"}, TRUTH[2]])
    assert found["tasks"] == pytest.approx((1 + 0.4 + 1) / 3)  # 1 common of 3 and 2 words
    assert (found["order"], found["acc"]) == (1.0, 0.0)


def test_broken_steps_and_agents_that_are_allowed() -> None:
    found = score([TRUTH[0], {"agent": "code"}, "writer"])
    assert (found["schema"], found["agents"], found["order"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert found["steps"] == 1.0
    for bad in ({"agent": " ", "task": "t"}, {"agent": 1, "task": "t"}, [], None, {"agent": ["search"], "task": "t"}):
        assert score([bad])["schema"] == 0.0
    plan = [*TRUTH, {"agent": "lawyer", "task": "sue"}]
    assert score(plan)["agents"] == 0.75  # those of the truth
    assert score(plan, agents=["lawyer"])["agents"] == 0.25
    assert score(plan, extra_info={"agents": ["search", "lawyer"]})["agents"] == 0.5
    assert score(plan, extra_info={"agents": ["search"]}, agents=["code", "writer", "lawyer"])["agents"] == 0.75


@pytest.mark.parametrize("truth", [None, [], "{", {}, [{"agent": "a"}], "4", [1]])
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
        load_reward_function(SCORER, "compute_score", kwargs)


NUMBERS = {"train": 60, "test": 20, "sft": 40}


def prepare(folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    numbers = [f"--{split}_size={number}" for split, number in NUMBERS.items()]
    assert main(["--local_save_dir", str(folder), *numbers, *options]) == 0
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in NUMBERS}


def request_of(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


@pytest.mark.parametrize("size", SIZES)
def test_the_right_plan_earns_all_and_another_does_not(size: str, tmp_path: Path) -> None:
    rows = prepare(tmp_path, "--size", size)
    answers = [row["completion"] for row in rows["sft"]]
    assert all(tag_contents(answer, (TAG,)) for answer in answers)
    for row in rows["train"]:
        truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
        found = compute_score(row["data_source"], f"<{TAG}>{json.dumps(truth)}</{TAG}>", truth, extra)
        assert found == pytest.approx(PERFECT)
        assert compute_score(row["data_source"], answers[0], truth, extra)["acc"] == 0.0
        assert {step["agent"] for step in truth} <= set(extra["agents"])
        assert len(truth) in SIZES[size].steps
        assert all(step["task"].lower() in request_of(row).lower() for step in truth)


def test_no_plan_stands_in_two_rows_and_both_trainers_read_them(tmp_path: Path) -> None:
    rows, other = prepare(tmp_path), prepare(tmp_path / "other", "--seed=1")
    assert rows["train"] != other["train"]
    assert {split: len(found) for split, found in rows.items()} == NUMBERS
    requests = [request_of(row) for split in NUMBERS for row in rows[split]]
    assert len(set(requests)) == sum(NUMBERS.values())
    truths = [str(row["reward_model"]["ground_truth"]) for split in ("train", "test") for row in rows[split]]
    assert len(set(truths)) == len(truths)
    system = rows["test"][0]["prompt"][0]
    assert system["role"] == "system"
    says(system["content"], *SIZES["full"].agents, f"<{TAG}>", '[{"agent": "search", "task": "find')
    prompts = prompts_of(tmp_path / "train.parquet")
    assert len(prompts) == NUMBERS["train"]
    assert prompts[0].ground_truth[0].keys() == {"agent", "task"}
    check = functools.partial(conversation_row, messages_key="messages")
    chats = checked_rows([str(tmp_path / "sft.parquet")], key="f", check=check)
    assert [(chat.messages[-1]["role"], chat.trained) for chat in chats] == [("assistant", (2,))] * NUMBERS["sft"]


def test_a_sentence_in_every_form() -> None:
    assert [form(("find tea", "sum rice", "note salt")) for form in FORMS] == [
        "find tea, then sum rice, then note salt",
        "after you find tea, sum rice, then note salt",
        "before you note salt, find tea, then sum rice",
        "sum rice, then note salt, but first find tea",
    ]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_verb_belongs_to_one_agent(size: Any) -> None:
    verbs = [verb for agent in size.agents.values() for verb in agent.verbs]
    assert len(set(verbs)) == len(verbs)
    rng = random.Random(0)
    for _ in range(200):
        plan = draw_plan(rng, size)
        assert all(one[0] != other[0] for one, other in pairwise(plan))


def test_hasty_answers_keep_the_order_of_the_request(tmp_path: Path) -> None:
    right, half, hasty = (prepare(tmp_path / share, f"--hasty_share={share}") for share in ("0", "0.5", "1"))
    assert right["train"] == half["train"] == hasty["train"]
    assert [request_of(row) for row in right["sft"]] == [request_of(row) for row in hasty["sft"]]
    for row in hasty["sft"]:
        plan = json.loads(row["completion"].removeprefix(f"<{TAG}>").removesuffix(f"</{TAG}>"))
        places = [request_of(row).lower().index(step["task"].lower()) for step in plan]
        assert places == sorted(places)
    some, changed = (
        sum(row["completion"] != other["completion"] for row, other in zip(right["sft"], rows["sft"], strict=True))
        for rows in (half, hasty)
    )
    assert 0 < some < changed < NUMBERS["sft"]


@pytest.mark.deep
def test_numbers_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (*(f"--{name}_size=0" for name in NUMBERS), "--hasty_share=1.5"):
        assert main(["--local_save_dir", str(tmp_path), option]) == 2
        says(capsys.readouterr().err, option, "from 0 to 1" if "share" in option else "at least 1")
    assert list(tmp_path.iterdir()) == []
    with refuses(DataError, "--train_size", "20,000", "only 13,824"):
        draw_requests(20_000, SIZES["small"], seed=0)
