"""The tasks of examples/instructions and examples/tools: their rows, and what their scorers count."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.sandbox import check
from grpo_dist.tasks.code import compute_score as score_of_programs

EXAMPLES = Path(__file__).parents[2] / "examples"
PATH = EXAMPLES / "instructions" / "instructions.py"
compute_score, rows, KINDS = (
    load_attribute(f"{PATH}:{name}", key="path") for name in ("compute_score", "rows", "KINDS")
)
QUESTIONS, search, calculator, score_of_tools = (
    load_attribute(f"{EXAMPLES / 'tools' / 'tools.py'}:{name}", key="path")
    for name in ("QUESTIONS", "search", "calculator", "compute_score")
)
score_of_agents = load_attribute(f"{EXAMPLES / 'tools' / 'agents.py'}:compute_score", key="path")


def score(text: str, *asked: tuple[str, object], topic: str = "bee") -> tuple[float, float, float]:
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


def test_what_instructions_are_worth() -> None:
    both = ("lowercase", None), ("sentences", 1)
    assert score("bees live in the hives.", *both) == (1.0, 1.0, 1.0)
    assert score("Bees live in the hives.", *both) == (0.625, 0.0, 0.5)
    for text in ("bees bees.", "wasps live in small nests.", "bees live in small hives and", ""):
        assert score(text, ("lowercase", None)) == (0.0, 0.0, 1.0), "short, of another topic, cut off, empty"


def test_the_splits_share_no_topic_and_ask_for_every_kind(tmp_path: Path) -> None:
    train, validation = rows("train"), rows("validation")
    assert (len(train), len(validation)) == (4000, 200)
    topics = [{row["extra_info"]["topic"] for row in split} for split in (train, validation)]
    assert not topics[0] & topics[1]
    for split in (train, validation):
        assert {kind for row in split for kind, _ in row["reward_model"]["ground_truth"]} == set(KINDS)
    assert train != rows("train", seed=1)
    for row in validation:
        (message,) = row["prompt"]
        for kind, value in row["reward_model"]["ground_truth"]:
            assert KINDS[kind][0].partition("{")[0] in message["content"]
            assert kind in ("sentences", "bullets") or value is None or str(value) in message["content"]
    subprocess.run([sys.executable, PATH, tmp_path / "data"], check=True)
    for split in ("train", "validation"):
        lines = (tmp_path / "data" / f"{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows(split)


def test_every_question_is_answered_by_searches_one_after_the_other() -> None:
    for question, answer in QUESTIONS:
        found = re.search(r"firm (\w+)", question)
        assert found is not None
        (person,) = re.findall(rf"{found[1]} was founded by (\w+)", " ".join(search(f"founder of {found[1]}")))
        (town,) = re.findall(rf"{person} was born in the town of (\w+)", " ".join(search(f"{person} born")))
        if question.startswith("On which river"):
            (town,) = re.findall(rf"{town} lies on the river (\w+)", " ".join(search(f"river of {town}")))
        assert town == answer
    assert len({question for question, _ in QUESTIONS}) == 240


def test_the_answer_counts_that_stands_last_in_its_tags() -> None:
    score = lambda text: score_of_tools("search", text, "Sokame", {})  # noqa: E731
    assert score("It is <answer>Ba</answer>, no: <answer> sokame.</answer>") == {"score": 1.0, "acc": 1.0}
    assert score("<answer>Sokame</answer><answer>Ba</answer>") == {"score": 0.1, "acc": 0.0}
    assert score("tool\nSokame") == {"score": 0.0, "acc": 0.0}
    assert [calculator(7, operation, 3) for operation in "+-*"] == [10, 4, 21]


def test_calls_of_agents_are_scored_as_a_plan() -> None:
    steps = [{"agent": "search", "task": "find the menu"}, {"agent": "writer", "task": "write a poem"}]
    asked = [json.dumps({"name": "ask", "arguments": step}) for step in steps]
    calls = [f"<tool_call>{each}</tool_call>\ntool\ndone\n" for each in asked]
    score = lambda text: score_of_agents("agents", text, steps, {})  # noqa: E731
    assert (score("".join(calls))["acc"], score("".join(calls))["score"]) == (1.0, pytest.approx(1.0))
    assert score("".join(reversed(calls)))["order"] == 0.5
    assert score(calls[0])["steps"] == 0.5
    assert score("<tool_call>{not JSON}</tool_call>")["schema"] == score("")["order"] == 0.0


def test_small_programs_have_answers_that_pass_their_tests_and_hasty_ones_that_do_not() -> None:
    row, answers, formulas = (
        load_attribute(f"{EXAMPLES / 'code' / 'programs.py'}:{name}", key="path")
        for name in ("row", "answers", "formulas")
    )
    assert len(set(formulas())) == 72
    try:
        check()
    except ConfigError as error:
        pytest.skip(str(error))
    given = row("7*a-b")
    programs = [given["extra_info"]["answer"], given["extra_info"]["answer"].replace("7*a-b", "a+b")]
    truth = [given["reward_model"]["ground_truth"]] * 2
    assert [found["acc"] for found in score_of_programs(programs, truth)] == [1.0, 0.0]
    right = [answer["prompt"].removeprefix("print ") in answer["completion"] for answer in answers()]
    assert 0.28 < sum(right) / len(right) < 0.42
