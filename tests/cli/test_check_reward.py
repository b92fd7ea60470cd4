"""`grpo-dist check-reward`: a reward function is tried on a few rows, in the process that a run would use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.cli.check_reward import own_answer
from grpo_dist.cli.entry import main
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import ConfigError
from tests.messages import refuses, says

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("looking at", solution_str)
    if solution_str == "red":
        raise KeyError("puce")
    return {"score": float(ground_truth in solution_str.lower()), "length": len(solution_str), "pred": "x"}
"""


def row(question: str, truth: Any, **extra_info: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": question}]
    return {"data_source": "mine", "prompt": prompt, "reward_model": {"ground_truth": truth}, "extra_info": extra_info}


ROWS = [row("Name a fruit.", "apple"), row("Name a sum.", "7", solution="3 + 4 = 7"), row("Name a colour.", "red")]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rows and a function of somebody's own in the present folder; returns what names them."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    Path("reward.py").write_text(FUNCTION)
    return ["data.train_files=rows.jsonl", "custom_reward_function.path=reward.py", "data.train_batch_size=2"]


def test_own_answers_are_scored_with_what_the_function_says(own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A failure is told with its traceback, and ends with 1."""
    assert main(["check-reward", *own]) == 1
    shown = capsys.readouterr()
    _, first, second, third = shown.out.split("rows.jsonl")
    says(first, "line 1", "'Name a fruit.'", "'apple'", "ground truth", "score      1", "looking")
    says(second, "'3 + 4 = 7'", "solution", "score      1", "length=9", "pred=x")
    says(third, "FAILED", "KeyError", 'raise KeyError("puce")', "red\n\n3 responses", "2 scored", "1 failed", "1 to 1")
    assert "Traceback" not in shown.err


@pytest.mark.deep
def test_answers_that_are_given(own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-reward", "--row", "1", "--answer", "An apple", *own, "--answer=a pear"]) == 0
    told = capsys.readouterr().out
    says(told, "'An apple'", "--answer", "score      1")
    says(told, "'a pear'", "score      0")
    assert "colour" not in told
    assert main(["check-reward", *own, "--rows", "1"]) == 0
    assert "colour" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--row", "4"], ["--row 4", "1 to 3"]),
        (["custom_reward_function.path=gone.py"], ["custom_reward_function.path", "gone.py"]),
        (["custom_reward_function.name=other"], ["reward.py", "'other'", "compute_score"]),
        (["data.train_bach_size=3"], ["data.train_bach_size", "data.train_batch_size"]),
        (["data.prompt_key=gone"], ["rows.jsonl", "gone"]),
    ],
)
def test_mistakes_end_with_2(
    arguments: list[str], parts: list[str], own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-reward", *own, *arguments]) == 2
    shown = capsys.readouterr()
    says(shown.err, *parts)
    assert "Traceback" not in shown.err


def test_the_built_in_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-reward", "--rows=1"]) == 0
    says(capsys.readouterr().out, "data_source=arithmetic", "score      0", "--answer")
    assert main(["check-reward", "--row=1", "--answer=#### 943"]) == 0
    says(capsys.readouterr().out, "acc=1", "score      1")


def test_where_a_row_has_its_own_answer() -> None:
    def prompt(truth: Any, **extra_info: Any) -> Prompt:
        return Prompt(0, "mine", [{"role": "user", "content": "?"}], truth, extra_info, "rows.jsonl, line 1")

    assert own_answer(prompt("7", answer="so 7"))[0] == "so 7"
    assert own_answer(prompt("7", answer=["no text"]))[0] == "7"
    assert own_answer(prompt({"target": 7}))[0] == '{"target": 7}'
    with refuses(ConfigError, "rows.jsonl, line 1", "--answer TEXT"):
        own_answer(prompt(None))
