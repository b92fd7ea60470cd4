import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.plugins.registry import load_attribute

PATH = Path(__file__).parents[2] / "examples" / "instructions" / "instructions.py"
compute_score = load_attribute(f"{PATH}:compute_score", key="path")
rows = load_attribute(f"{PATH}:rows", key="path")
KINDS = load_attribute(f"{PATH}:KINDS", key="path")


def score(text: str, *asked: tuple[str, object], topic: str = "bee") -> tuple[float, float, float]:
    """score, acc and followed."""
    found = compute_score("instructions", text, [list(each) for each in asked], {"topic": topic})
    return found["score"], found["acc"], found["followed"]


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        (("lowercase", None), "most bees live in hives.", "Most bees live in hives."),
        (("capitals", None), "MOST BEES LIVE IN HIVES.", "Most bees live in hives."),
        (("no_comma", None), "Most bees live in hives.", "Bees, I think, live in hives."),
        (("quotes", None), '"Most bees live in hives."', 'Most "bees" live in hives.'),
        (("sentences", 2), "Most bees live in hives. They fly!", "Most bees live in hives."),
        (("sentences", 1), "Bees weigh 0.1 grams at most.", "Bees are small. They weigh 0.1 grams."),
        (("bullets", 2), "- Most bees live in hives.\n\n- They fly.", "- Most bees live in hives. - They fly."),
        (("bullets", 2), "- Most bees live\n- in hives.", "- Most bees live\nin hives."),
        (("most_words", 12), "Most bees live in hives.", "Most bees live in hives and they " + "never " * 6 + "fly."),
        (("first_word", "Often"), "Often bees live in hives.", "Bees often live in hives."),
        (("first_word", "Well"), '"Well, bees live in hives."', "Wellness bees live in hives."),
        (("last_words", "That is all."), "Bees live in hives. That is all.", "That is all. Bees live in hives."),
        (("word", "small"), "Most bees live in SMALL hives.", "Most bees live in smaller hives."),
    ],
)
def test_each_kind(asked: tuple[str, object], right: str, wrong: str) -> None:
    assert score(right, asked) == (1.0, 1.0, 1.0)
    assert score(wrong, asked) == (0.25, 0.0, 0.0)


def test_two_instructions_are_worth_the_same_and_acc_wants_both() -> None:
    both = ("lowercase", None), ("sentences", 1)
    assert score("bees live in the hives.", *both) == (1.0, 1.0, 1.0)
    assert score("Bees live in the hives.", *both) == (0.625, 0.0, 0.5)


@pytest.mark.parametrize(
    "text",
    ["bees bees.", "wasps live in small nests.", "bees live in small hives and", ""],
    ids=["short", "another topic", "cut off", "empty"],
)
def test_what_is_no_answer_is_worth_nothing(text: str) -> None:
    assert score(text, ("lowercase", None)) == (0.0, 0.0, 1.0)


def test_the_splits_share_no_topic_and_ask_for_every_kind() -> None:
    train, validation = rows("train"), rows("validation")
    assert (len(train), len(validation)) == (4000, 200)
    topics = [{row["extra_info"]["topic"] for row in split} for split in (train, validation)]
    assert not topics[0] & topics[1]
    for split in (train, validation):
        assert {kind for row in split for kind, _ in row["reward_model"]["ground_truth"]} == set(KINDS)
    assert rows("train") == train != rows("train", seed=1)


def test_a_question_says_what_is_asked() -> None:
    for row in rows("validation"):
        (message,) = row["prompt"]
        for kind, value in row["reward_model"]["ground_truth"]:
            start = KINDS[kind][0].partition("{")[0]
            assert start in message["content"]
            assert kind in ("sentences", "bullets") or value is None or str(value) in message["content"]


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PATH, tmp_path / "data"], check=True)
    for split in ("train", "validation"):
        lines = (tmp_path / "data" / f"{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows(split)
