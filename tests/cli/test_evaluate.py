"""`grpo-dist eval`: the figures of models by hand, and which models are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.assets.usage import Usage
from grpo_dist.cli.entry import main
from grpo_dist.cli.evaluate import Answers, Figures, compared, figures
from grpo_dist.data.prompts import Prompt
from grpo_dist.engines.base import Response
from grpo_dist.rewards.base import RewardResult
from grpo_dist.rewards.forms import Failure
from tests.cli.scripted import ENGINE, scripted_model, seen
from tests.messages import says

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 2.0 * (solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}
"""


def answers(index: int, results: list[RewardResult | Failure], source: str = "sums") -> Answers:
    responses = [Response([1] * (i + 1), [0.0] * (i + 1), i == 0, [0] * (i + 1)) for i in range(len(results))]
    return Answers(Prompt(index, source, [], None, {}, f"line {index}"), ["x"] * len(results), responses, results)


def scored(score: float, pred: str | None = None, **extra: float) -> RewardResult:
    return RewardResult(score, extra, pred=pred)


def test_figures_by_hand() -> None:
    """Of three answers to a prompt two are right, of the other's none: pass@2 = 1 - C(1, 2) / C(3, 2) = 1, and 0."""
    two = answers(0, [scored(1, "a", acc=1), scored(0, "b", acc=0), scored(1, "a", acc=1)])
    none = answers(1, [scored(0, "c", acc=0), Failure("it raised"), scored(0, None, acc=0)])
    [found] = figures("model", [two, none])
    assert found.variable == "acc"
    assert {name: values.tolist() for name, values in found.values.items()} == {
        "mean@3": [pytest.approx(2 / 3), 0.0],
        "pass@2": [1.0, 0.0],
        "pass@3": [1.0, 0.0],
        "maj@3": [1.0, 0.0],
    }
    assert found.means == {"tokens": 2.0, "cut off": pytest.approx(1 / 3), "not scored": pytest.approx(1 / 6)}


def test_without_acc_the_score_is_measured_and_sources_are_apart() -> None:
    first, second = figures("m", [answers(0, [scored(0.5)]), answers(1, [scored(-2.0)], "other")])
    assert (first.source, first.variable, second.source) == ("sums", "reward", "other")
    assert first.values["mean@1"].tolist() == [0.5]
    assert list(second.values) == ["mean@1"]


def test_a_difference_is_that_of_the_same_prompts() -> None:
    """Prompts 1 and 2 are in both: differences 1 and 0, mean 0.5, standard error sqrt(0.5 / 2) = 0.5."""
    base = Figures("base", "s", "acc", np.array([0, 1, 2]), {"mean@1": np.array([1.0, 0.0, 1.0])}, {"tokens": 3.0})
    trained = Figures("run", "s", "acc", np.array([1, 2]), {"mean@1": np.array([1.0, 1.0])}, {"tokens": 4.0})
    first, second = compared([base, trained])
    assert first["acc mean@1"][0] == pytest.approx(2 / 3)
    assert "mean@1 - first" not in first
    assert second["mean@1 - first"] == pytest.approx([0.5, 0.5 - 1.959964 * 0.5, 0.5 + 1.959964 * 0.5])
    assert (second["prompts"], second["tokens"]) == (2, 4.0)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model that is right once, and one that is always; rows and a reward function in the present folder."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"data_source": "mine", "prompt": f"{i}+{i}=?", "reward_model": {"ground_truth": str(2 * i)}} for i in (1, 2)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text(FUNCTION)
    base = scripted_model(tmp_path / "base", {"1+1": ["2"], "2+2": ["5"]})
    return base, scripted_model(tmp_path / "trained", {"1+1": ["2"], "2+2": ["4"]})


def test_two_models_in_one_table(models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    base, trained = map(str, models)
    Usage(7, "Be brief.", {}, {"max_tokens": 9}).write(models[0])
    told = [base, trained, "--data", "rows.jsonl", "custom_reward_function.path=reward.py", ENGINE]
    assert main(["eval", *told, "--json", "--output", "out.jsonl"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["source"], first["model"], first["prompts"]) == ("mine", base, 2)
    assert first["acc mean@1"] == pytest.approx([0.5, 0.0945, 0.9055], abs=1e-4)  # Wilson's, of 1 in 2
    assert second["acc mean@1"][0] == 1.0
    assert second["mean@1 - first"][0] == 0.5
    assert all("Be brief." in each["prompt"] and each["max_tokens"] == 9 for path in models for each in seen(path))
    written = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [(row["model"], row["scores"]) for row in written] == [
        (base, [2.0]), (base, [0.0]), (trained, [2.0]), (trained, [2.0]),
    ]  # fmt: skip

    assert main(["eval", *told, "--limit", "1"]) == 0
    says(capsys.readouterr().out, "1 rows", "greedy", base, trained, "acc mean@1", "1.000")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["{base}", "--base"], ["--base", "{base}"]),
        (["{base}", "--all-steps"], ["--all-steps", "{base}"]),
        (["custom_reward_function.path=reward.py"], ["trainer.default_local_dir"]),
        (["{base}", "--data", "gone.jsonl"], ["--data", "gone.jsonl"]),
        (["{base}", "--data", "rows.jsonl"], ["'mine'", "custom_reward_function.path"]),
        (["{base}", "data.val_files=[]"], ["data.val_files", "--data"]),
        (["{base}", "custom_reward_function.path=reward.py:gone"], ["custom_reward_function.path", "reward.py:gone"]),
        (["{base}", "--output", "rows.jsonl"], ["--output rows.jsonl"]),
        (["{base}", "--likelihood"], ["--likelihood", "--lm-eval"]),
        (["{base}", "--lm-eval", "arc_easy", "--n", "2", "--data", "rows.jsonl"], ["--data, --n", "--lm-eval"]),
        (["{base}", "--lm-eval", "arc_easy", "--lm-eval-python", "gone"], ["--lm-eval-python gone"]),
    ],
)
def test_mistakes(
    arguments: list[str], parts: list[str], models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def filled(text: Any) -> str:
        return str(text).format(base=models[0])

    assert main(["eval", *map(filled, arguments), ENGINE]) == 2
    told = capsys.readouterr().err
    says(told, *map(filled, parts))
    assert "Traceback" not in told


def test_what_is_for_lm_eval_stands_behind_dashes(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(models[0]), ENGINE, "--", "--include_path", "tasks"]) == 2
    says(capsys.readouterr().err, "--include_path tasks", "--lm-eval")
