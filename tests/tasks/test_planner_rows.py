"""Generated requests for the planner: exact plans, no plan twice, the same for the same seed."""

from __future__ import annotations

import functools
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from grpo_dist.data.training_rows import checked_rows, conversation_row
from grpo_dist.errors import DataError
from grpo_dist.rewards.format import tag_contents
from grpo_dist.rewards.load import score_by_data_source
from grpo_dist.tasks.planner import WEIGHTS
from grpo_dist.tasks.planner_rows import FORMS, SIZES, TAG, draw_plan, draw_requests
from grpo_dist.tasks.prepare import main
from tests.messages import refuses, says
from tests.tasks.conftest import prompts_of

NUMBERS = {"train": 60, "test": 20, "sft": 40}


def prepare(folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of the files that the command writes."""
    numbers = [f"--{split}_size={number}" for split, number in NUMBERS.items()]
    assert main(["planner", "--local_save_dir", str(folder), *numbers, *options]) == 0
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in NUMBERS}


def request_of(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


@pytest.mark.parametrize("size", SIZES)
def test_the_right_plan_earns_all_and_another_does_not(size: str, tmp_path: Path) -> None:
    """By the scorer that the data source chooses, and in the form that the answers have."""
    rows = prepare(tmp_path, "--size", size)
    answers = [row["completion"] for row in rows["sft"]]
    assert all(tag_contents(answer, (TAG,)) for answer in answers)
    for row in rows["train"]:
        truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
        found = score_by_data_source(row["data_source"], f"<{TAG}>{json.dumps(truth)}</{TAG}>", truth, extra)
        assert found == pytest.approx(dict.fromkeys(("score", *WEIGHTS, "acc"), 1.0))
        assert score_by_data_source(row["data_source"], answers[0], truth, extra)["acc"] == 0.0
        assert {step["agent"] for step in truth} <= set(extra["agents"])
        assert len(truth) in SIZES[size].steps
        assert all(step["task"].lower() in request_of(row).lower() for step in truth)


def test_no_plan_stands_in_two_rows(tmp_path: Path) -> None:
    rows = prepare(tmp_path)
    assert {split: len(found) for split, found in rows.items()} == NUMBERS
    requests = [request_of(row) for split in NUMBERS for row in rows[split]]
    assert len(set(requests)) == sum(NUMBERS.values())
    truths = [str(row["reward_model"]["ground_truth"]) for split in ("train", "test") for row in rows[split]]
    assert len(set(truths)) == len(truths)


def test_the_seed_decides(tmp_path: Path) -> None:
    assert prepare(tmp_path / "a") == prepare(tmp_path / "b")
    assert prepare(tmp_path / "a")["train"] != prepare(tmp_path / "c", "--seed=1")["train"]


def test_a_sentence_in_every_form() -> None:
    """Steps are given in the order in which they are done."""
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


def test_the_system_message_names_the_agents_and_the_form(tmp_path: Path) -> None:
    system = prepare(tmp_path)["test"][0]["prompt"][0]
    assert system["role"] == "system"
    says(system["content"], *SIZES["full"].agents, f"<{TAG}>", '[{"agent": "search", "task": "find')


def test_both_trainers_read_the_files(tmp_path: Path) -> None:
    prepare(tmp_path)
    prompts = prompts_of(tmp_path / "train.parquet")
    assert len(prompts) == NUMBERS["train"]
    assert prompts[0].ground_truth[0].keys() == {"agent", "task"}
    check = functools.partial(conversation_row, messages_key="messages")
    chats = checked_rows([str(tmp_path / "sft.parquet")], key="f", check=check)
    assert [(chat.messages[-1]["role"], chat.trained) for chat in chats] == [("assistant", (2,))] * NUMBERS["sft"]


def plan_in(row: dict[str, Any]) -> list[dict[str, str]]:
    return json.loads(row["completion"].removeprefix(f"<{TAG}>").removesuffix(f"</{TAG}>"))


def test_hasty_answers_keep_the_order_of_the_request(tmp_path: Path) -> None:
    """A share of the answers alone: requests and right plans stay."""
    right, half, hasty = (prepare(tmp_path / share, f"--hasty_share={share}") for share in ("0", "0.5", "1"))
    assert right["train"] == half["train"] == hasty["train"]
    assert [request_of(row) for row in right["sft"]] == [request_of(row) for row in hasty["sft"]]
    for row in hasty["sft"]:
        places = [request_of(row).lower().index(step["task"].lower()) for step in plan_in(row)]
        assert places == sorted(places)
    changed = [row["completion"] != other["completion"] for row, other in zip(right["sft"], hasty["sft"], strict=True)]
    some = [row["completion"] != other["completion"] for row, other in zip(right["sft"], half["sft"], strict=True)]
    assert 0 < sum(some) < sum(changed) < NUMBERS["sft"]


def test_no_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["planner", "--local_save_dir", str(tmp_path), "--hasty_share=1.5"]) == 2
    says(capsys.readouterr().err, "--hasty_share=1.5", "from 0 to 1")


@pytest.mark.parametrize("key", ["train_size", "test_size", "sft_size"])
def test_impossible_sizes(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["planner", "--local_save_dir", str(tmp_path), f"--{key}=0"]) == 2
    says(capsys.readouterr().err, f"--{key}=0", "at least 1")
    assert list(tmp_path.iterdir()) == []


def test_more_requests_than_there_are() -> None:
    with refuses(DataError, "--train_size", "20,000", "only 13,824"):
        draw_requests(20_000, SIZES["small"], seed=0)
