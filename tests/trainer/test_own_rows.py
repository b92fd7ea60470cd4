"""A user with rows and rewards of their own: the command typed, and what it says before Ray starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_dist.main import main
from tests.messages import says

ROWS = [{"question": "1+1?", "answer": "2", "level": 1}, {"question": "2+2?", "answer": "4", "level": 2}]
REWARD, WEIGHTS = "custom_reward_function.path", "custom_reward_function.weights"
TRL = """
def correct(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command with files in the folder of the test; gives its exit code and all that it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("grpo_dist.runtime.cluster.running_cluster", lambda: None)

    def command(*overrides: str, rows: list[dict] = ROWS, code: str = VERL) -> tuple[int, str]:
        Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("reward.py").write_text(code)
        keys = ["data.train_files=sums.jsonl", "data.train_batch_size=2", "trainer.dry_run=true"]
        keys += ["data.max_prompt_length=64", "data.max_response_length=64"]
        keys += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.model.path=builtin:tiny-qwen3"]
        status = main([*keys, *overrides])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return status, shown.out + shown.err

    return command


def test_question_and_answer(session) -> None:
    status, said = session(f"{REWARD}=reward.py")
    assert status == 0
    says(said, "data.prompt_key=question", "data.answer_key=answer", "data.data_source=sums")


def test_a_trl_function_with_column_arguments_and_a_template(session) -> None:
    template = r"data.prompt_template='{question} (level {level})\n#### '"
    assert session(f"{REWARD}=reward.py", "custom_reward_function.name=correct", template, code=TRL)[0] == 0


def test_a_function_without_a_ground_truth_needs_no_answers(session) -> None:
    rows = [{"question": row["question"]} for row in ROWS]
    status, said = session(f"{REWARD}=reward.py", rows=rows)
    assert status == 2
    says(said, "sums.jsonl, line 1", "data.answer_key=COLUMN", "ground_truth=None")
    optional = VERL.replace("ground_truth, extra_info", "ground_truth=None, extra_info=None")
    assert session(f"{REWARD}=reward.py", rows=rows, code=optional)[0] == 0


MIXED = f"""{VERL}{TRL}
async def short(completions, **columns):
    return [-len(text) / 100 for text in completions]
def leveled(solution_strs, data_sources, ground_truths, extra_infos):
    return [None for _ in solution_strs]
"""


def test_a_list_of_functions_of_any_forms(session) -> None:
    named = "[reward.py:correct,reward.py:short,{path: reward.py:leveled, weight: 0.1},reward.py]"
    status, said = session(f"{REWARD}={named}", code=MIXED)
    assert status == 0
    says(said, "reward: reward.py:correct, reward.py:short, reward.py:leveled, reward.py")
    assert session(f"{REWARD}=[reward.py:correct,reward.py:short]", f"{WEIGHTS}=[1.0,0.5]", code=MIXED)[0] == 0
    gdpo = "algorithm.adv_estimator=gdpo"
    assert session(f"{REWARD}=[reward.py:correct,reward.py:short]", gdpo, code=MIXED)[0] == 0
    status, said = session(f"{REWARD}=[reward.py:correct,reward.py:shirt]", code=MIXED)
    assert status == 2
    says(said, "custom_reward_function.path", "reward.py", "'shirt'", "'short'")
    status, said = session(f"{REWARD}=[reward.py:short,reward.py:short]", code=MIXED)
    assert status == 2
    says(said, f"{REWARD}[1]", "'short'", "label")


@pytest.mark.parametrize(
    ("overrides", "rows", "code", "words"),
    [
        ([f"{REWARD}=null"], ROWS, VERL, ["sums.jsonl, line 1", "data.data_source=", REWARD]),
        (["data.prompt_template='{query}'"], ROWS, VERL, ["sums.jsonl, line 1", "'query'", "question, answer, level"]),
        (["data.prompt_template='{question}'", "data.prompt_key=question"], ROWS, VERL, ["data.prompt_key=question"]),
        (["data.answer_key=label"], ROWS, VERL, ["sums.jsonl, line 1", "data.answer_key=label", "'label'"]),
        ([], [*ROWS, {**ROWS[0], "solution": "x"}], VERL, ["line 3", "data.answer_key=solution"]),
        (["custom_reward_function.name=correct"], [{"prompt": "a"}] * 2, TRL, ["line 1", "'answer'", "default"]),
    ],
)
def test_mistakes_are_refused_with_what_to_set(
    session, overrides: list[str], rows: list[dict], code: str, words: list[str]
) -> None:
    status, said = session(f"{REWARD}=reward.py", *overrides, rows=rows, code=code)
    assert status == 2
    says(said, *words)
