"""`grpo-dist generate`: prompts from everywhere, asked as the run asked them.

Answers beside each other.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from grpo_dist.assets.model_folder import Usage
from grpo_dist.cli.entry import main
from grpo_dist.cli.generate import side_by_side
from tests.cli.scripted import ENGINE, scripted_model, seen
from tests.messages import says

ROWS = [
    {"data_source": "mine", "prompt": "1+1=?", "reward_model": {"ground_truth": "2"}},
    {"data_source": "mine", "prompt": "2+2=?", "reward_model": {"ground_truth": "4"}},
]
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float({})\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return scripted_model(tmp_path / "model", {"1+1": ["2", "3"], "2+2": ["5", "4"], "": ["hm", "well"]})


def test_texts_are_answered_one_after_another(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(model), ENGINE, "--prompts", "2+2=?", "--prompts", "1+1=?", "--n", "2"]) == 0
    assert capsys.readouterr().out == "5\n4\n2\n3\n"
    first, second = seen(model)
    assert "2+2" in first["prompt"]
    assert first["n"] == 2
    assert "1+1" in second["prompt"]
    assert first["temperature"] == 1.0  # greedy ones would be the same


def test_as_the_run_asked(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Usage(5, "Be brief.", {}, {"temperature": 0.5, "max_tokens": 3, "stop": ["end"]}).write(model)
    assert main(["generate", str(model), ENGINE, "--prompts", "1+1=?"]) == 0
    assert main(["generate", str(model), ENGINE, "--prompts", "1+1=?", "--temperature", "0", "--max-tokens", "1"]) == 0
    usual, asked = seen(model)
    assert "Be brief." in usual["prompt"]
    assert (usual["temperature"], usual["max_tokens"], usual["stop"]) == (0.5, 3, ["end"])
    assert (asked["temperature"], asked["max_tokens"], asked["stop"]) == (0.0, 1, ["end"])


def test_rows_of_a_file_are_scored_where_they_can_be(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("reward.py").write_text(REWARD.format("solution_str == ground_truth"))
    arguments = ["generate", str(model), ENGINE, "--prompts", "rows.jsonl", "--n", "2"]
    assert main([*arguments, "custom_reward_function.path=reward.py", "--output", "out.jsonl"]) == 0
    says(capsys.readouterr().err, "2 prompts", "out.jsonl")
    written = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["responses"] for row in written] == [["2", "3"], ["5", "4"]]
    assert [row["scores"] for row in written] == [[1.0, 0.0], [0.0, 1.0]]
    assert written[0]["prompt"] == [{"role": "user", "content": "1+1=?"}]
    assert written[0]["truncated"] == [False, False]

    assert main([*arguments, "--output", "out.jsonl"]) == 2  # it is there
    says(capsys.readouterr().err, "--output out.jsonl")
    assert main(arguments) == 0  # no scorer for this data source
    shown = capsys.readouterr()
    assert [json.loads(line)["ground_truth"] for line in shown.out.splitlines()] == ["2", "4"]
    assert "scores" not in shown.out
    says(shown.err, "'mine'")


def test_standard_input_and_a_chat(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=?\n\n2+2=?\n"))
    assert main(["generate", str(model), ENGINE]) == 0
    assert capsys.readouterr().out == "2\n5\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", str(model), ENGINE]) == 2
    says(capsys.readouterr().err, "--prompts")

    terminal = io.StringIO("1+1=?\n/take 2\nreally?\n/new\nreally?\n\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["generate", str(model), ENGINE, "--n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "[1]" in shown
    assert "[2]" in shown
    asked = [each["prompt"] for each in seen(model)[-3:]]
    assert "1+1" in asked[1]
    assert "3" in asked[1]
    assert "really?" in asked[1]
    assert "1+1" not in asked[2]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["gone"], ["gone", "builtin:tiny-qwen3"]),
        (["{model}", "--step", "3"], ["--step 3", "trainer.save_freq"]),
        (["{model}", "--prompts", "rows.jsonl", "--prompts", "text"], ["--prompts"]),
        (["{model}", "data.promt_key=x"], ["data.promt_key", "data.prompt_key"]),
        (
            ["{model}", "--max-model-len", "100000", "--prompts", "x"],
            ["--max-model-len 100000", "max_position_embeddings", "512"],
        ),
    ],
)
def test_mistakes(arguments: list[str], parts: list[str], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *(each.format(model=model) for each in arguments), ENGINE]) == 2
    told = capsys.readouterr().err
    says(told, *parts)
    assert "Traceback" not in told


def test_one_answer_is_shown_as_it_is() -> None:
    assert list(side_by_side(["a  b\n\nc"], 20)) == ["a  b\n\nc"]


def test_columns_have_the_same_width_and_wrap() -> None:
    lines = list(side_by_side(["one two", "x\n\ny"], 52))
    assert lines == ["[1]                       [2]", "one two                   x", "", "                          y"]
    assert list(side_by_side(["w " * 20, "z"], 52))[1:3] == [
        f"{' '.join('w' * 12)}   z".replace("   z", " " * 3 + "z"),
        "w w w w w w w w",
    ]


def test_what_has_no_room_comes_below() -> None:
    assert list(side_by_side(["a", "b", "c"], 55)) == [
        "[1]                        [2]",
        "a                          b",
        "[3]",
        "c",
    ]
