"""`grpo-dist generate` and `eval`: prompts from everywhere, asked as the run asked them, and the figures of models."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import Usage, check_model_folder, load_tokenizer
from grpo_dist.cli.evaluate import Figures, compared, figures
from grpo_dist.cli.generate import side_by_side
from grpo_dist.cli.trained import Answers
from grpo_dist.config.load import with_overrides
from grpo_dist.data.prompts import Prompt
from grpo_dist.engines.base import Response
from grpo_dist.plan.commands import GRPO
from grpo_dist.rewards.contract import Failure, RewardResult
from grpo_dist.trainer.record import EXPORTED, write_config
from grpo_dist.trainer.run_prompts import load_run_prompts
from tests.cli.conftest import Call
from tests.cli.scripted import ENGINE, SCRIPT, scripted_model, seen
from tests.messages import says
from tests.records import json_lines
from tests.trainer.checkpoints import exported_model

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
    two = answers(0, [scored(1, "a", acc=1), scored(0, "b", acc=0), scored(1, "a", acc=1)])
    none = answers(1, [scored(0, "c", acc=0), Failure("it raised"), scored(0, None, acc=0)])
    [found] = figures("model", [two, none])
    assert found.variable == "acc"
    expected = {"mean@3": [pytest.approx(2 / 3), 0.0], "pass@2": [1.0, 0.0], "pass@3": [1.0, 0.0], "maj@3": [1.0, 0.0]}
    assert {name: values.tolist() for name, values in found.values.items()} == expected
    assert found.means == {"tokens": 2.0, "cut off": pytest.approx(1 / 3), "not scored": pytest.approx(1 / 6)}
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


def test_answers_are_shown_beside_each_other() -> None:
    assert list(side_by_side(["a  b\n\nc"], 20)) == ["a  b\n\nc"]
    lines = list(side_by_side(["one two", "x\n\ny"], 52))
    assert lines == ["[1]                       [2]", "one two                   x", "", "                          y"]
    assert list(side_by_side(["w " * 20, "z"], 52))[1:3] == ["w w w w w w w w w w w w   z", "w w w w w w w w"]
    below = list(side_by_side(["a", "b", "c"], 55))
    assert below == ["[1]                        [2]", "a                          b", "[3]", "c"], "no room for three"


def write_rows(file: Path, source: str, rows: dict[str, str]) -> None:
    each = {"data_source": source}
    table = [each | {"prompt": text, "reward_model": {"ground_truth": truth}} for text, truth in rows.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in table))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model that is right once, and one that is always; rows and a reward function in the present folder."""
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"), "mine", {"1+1=?": "2", "2+2=?": "4"})
    Path("reward.py").write_text(FUNCTION)
    base = scripted_model(tmp_path / "base", {"1+1": ["2", "3"], "2+2": ["5", "4"], "": ["hm", "well"]})
    return base, scripted_model(tmp_path / "trained", {"1+1": ["2"], "2+2": ["4"]})


def test_two_models_in_one_table(models: tuple[Path, Path], call: Call) -> None:
    base, trained = map(str, models)
    Usage(7, "Be brief.", {}, {"max_tokens": 9}).write(models[0])
    told = [base, trained, "--data", "rows.jsonl", "custom_reward_function.path=reward.py", ENGINE]
    first, second = json.loads(call("eval", *told, "--json", "--output", "out.jsonl").out)
    assert (first["source"], first["model"], first["prompts"]) == ("mine", base, 2)
    assert first["acc mean@1"] == pytest.approx([0.5, 0.0945, 0.9055], abs=1e-4)  # Wilson's, of 1 in 2
    assert (second["acc mean@1"][0], second["mean@1 - first"][0]) == (1.0, 0.5)
    assert all("Be brief." in each["prompt"] and each["max_tokens"] == 9 for path in models for each in seen(path))
    written = json_lines(Path("out.jsonl"))
    scores = [(row["model"], *row["scores"]) for row in written]
    assert scores == [(base, 2.0), (base, 0.0), (trained, 2.0), (trained, 2.0)]

    says(call("eval", *told, "--limit", "1").out, "1 rows", "greedy", base, trained, "acc mean@1", "1.000")


@pytest.fixture
def model(models: tuple[Path, Path]) -> Path:
    return models[0]


def test_texts_are_answered_one_after_another_as_the_run_asked(model: Path, call: Call) -> None:
    assert call("generate", model, ENGINE, "--prompts", "2+2=?", "--prompts", "1+1=?", "--n", "2").out == "5\n4\n2\n3\n"
    first, second = seen(model)
    assert (first["n"], first["temperature"]) == (2, 1.0), "greedy ones would be the same"
    assert ("2+2" in first["prompt"], "1+1" in second["prompt"]) == (True, True)
    Usage(5, "Be brief.", {}, {"temperature": 0.5, "max_tokens": 3, "stop": ["end"]}).write(model)
    for given in ([], ["--temperature", "0", "--max-tokens", "1"]):
        call("generate", model, ENGINE, "--prompts", "1+1=?", *given)
    usual, asked = seen(model)[2:]
    assert "Be brief." in usual["prompt"]
    assert (usual["temperature"], usual["max_tokens"], usual["stop"]) == (0.5, 3, ["end"])
    assert (asked["temperature"], asked["max_tokens"], asked["stop"]) == (0.0, 1, ["end"])


def test_rows_of_a_file_are_scored_where_they_can_be(model: Path, call: Call) -> None:
    arguments = ["generate", str(model), ENGINE, "--prompts", "rows.jsonl", "--n", "2"]
    said = call(*arguments, "custom_reward_function.path=reward.py", "--output", "out.jsonl")
    says(said.err, "2 prompts", "out.jsonl")
    written = json_lines(Path("out.jsonl"))
    assert [row["responses"] for row in written] == [["2", "3"], ["5", "4"]]
    assert [row["scores"] for row in written] == [[2.0, 0.0], [0.0, 2.0]]
    assert written[0]["prompt"] == [{"role": "user", "content": "1+1=?"}]
    assert written[0]["truncated"] == [False, False]

    says(call(*arguments, "--output", "out.jsonl", code=2).err, "--output out.jsonl")  # it is there
    shown = call(*arguments)  # no scorer for this data source
    assert [json.loads(line)["ground_truth"] for line in shown.out.splitlines()] == ["2", "4"]
    assert "scores" not in shown.out
    says(shown.err, "'mine'")


def test_texts_and_a_chat(model: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=?\n\n2+2=?\n"))
    assert call("generate", model, ENGINE).out == "2\n5\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    says(call("generate", model, ENGINE, code=2).err, "--prompts")

    terminal = io.StringIO("1+1=?\n/take 2\nreally?\n/new\nreally?\n\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    says(call("generate", model, ENGINE, "--n", "2").out, "[1]", "[2]")
    _, taken, new = (each["prompt"] for each in seen(model)[-3:])
    says(taken, "1+1", "3", "really?")
    assert "1+1" not in new


@pytest.mark.parametrize(
    ("command", "arguments", "parts"),
    [
        ("eval", ["{base}", "--base"], ["--base", "{base}"]),
        ("eval", ["{base}", "--all-steps"], ["--all-steps", "{base}"]),
        ("eval", ["custom_reward_function.path=reward.py"], ["trainer.default_local_dir"]),
        ("eval", ["{base}", "--data", "gone.jsonl"], ["--data", "gone.jsonl"]),
        ("eval", ["{base}", "--data", "rows.jsonl"], ["'mine'", "custom_reward_function.path"]),
        ("eval", ["{base}", "data.val_files=[]"], ["data.val_files", "--data"]),
        ("eval", ["{base}", "custom_reward_function.path=reward.py:x"], ["custom_reward_function.path", "reward.py:x"]),
        ("eval", ["{base}", "--output", "rows.jsonl"], ["--output rows.jsonl"]),
        ("generate", ["gone"], ["gone", "trainer.default_local_dir", "builtin:tiny-qwen3"]),
        ("generate", ["{base}", "--step", "3"], ["--step 3", "trainer.save_freq"]),
        ("generate", ["{base}", "--prompts", "rows.jsonl", "--prompts", "text"], ["--prompts"]),
        ("generate", ["{base}", "data.promt_key=x"], ["data.promt_key", "data.prompt_key"]),
        ("generate", ["{base}", "--max-model-len", "1000", "--prompts", "x"],
         ["--max-model-len 1000", "max_position_embeddings", "512"]),
    ],
)  # fmt: skip
def test_mistakes(command: str, arguments: list[str], parts: list[str], model: Path, call: Call) -> None:
    told = call(command, *(each.format(base=model) for each in arguments), ENGINE, code=2).err
    says(told, *(each.format(base=model) for each in parts))


# --- the rows of a run ---------------------------------------------------------------------------------------------
LIMIT = "data.max_prompt_length=64"
# (keys of the run, rows that it validates on, what becomes of the second one, which has more tokens)
CUT = [LIMIT, "data.filter_overlong_prompts=false"]
LIMITS = [
    ([LIMIT], [0, 2], "left out"),
    ([*CUT, "data.truncation=left"], [0, 1, 2], "data.truncation=left"),
    pytest.param([*CUT, "data.truncation=middle"], [0, 1, 2], "data.truncation=middle", marks=pytest.mark.deep),
    pytest.param([LIMIT, "data.val_max_samples=2"], [0], "left out", marks=pytest.mark.deep),
    pytest.param(["data.max_prompt_length=200"], [0, 1, 2], "", marks=pytest.mark.deep),
]


def a_run(folder: Path, *keys: str) -> Any:
    base = scripted_model(folder / "base", {"": ["2"]})
    write_rows(folder / "val.jsonl", "arithmetic", dict.fromkeys(["1+1=?", "1" * 90 + "+1=?", "2+2=?"], "2"))
    places = [f"trainer.default_local_dir={folder}/run", f"data.val_files={folder}/val.jsonl"]
    config = with_overrides({}, [*places, f"actor_rollout_ref.model.path={base}", *keys], GRPO)
    (folder / "run").mkdir()
    write_config(config, folder / "run")
    exported_model(folder / "run" / EXPORTED, config, 4, None)
    (folder / "run" / EXPORTED / SCRIPT).write_text(json.dumps({"": ["2"]}))
    return config


@pytest.mark.parametrize(("keys", "rows", "fate"), LIMITS, ids=lambda value: str(value))
def test_a_runs_own_rows_are_those_that_it_validates_on(
    keys: list[str], rows: list[int], fate: str, tmp_path: Path, call: Call
) -> None:
    config = a_run(tmp_path, *keys)
    folder = resolve_model_path("builtin:tiny-qwen3")
    prompts, _ = load_run_prompts(config, check_model_folder(folder, setting="x", trust_remote_code=False))
    assert [each.prompt.index for each in prompts.validation] == rows
    run_dir = tmp_path / "run"
    shown = call("eval", run_dir, ENGINE, "--base", "--json", "--output", tmp_path / "out.jsonl")
    assert [row["prompts"] for row in json.loads(shown.out)] == [len(rows)] * 2
    written = [json.loads(line)["row"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == [f"{tmp_path}/val.jsonl, line {row + 1}" for row in rows] * 2
    assert all(len(each.token_ids) <= config.data.max_prompt_length for each in prompts.validation)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    asked = [tokenizer.decode(each.token_ids) for each in prompts.validation]
    for model in (run_dir / EXPORTED, tmp_path / "base"):
        assert [each["prompt"] for each in seen(model)] == asked
    told = [line for line in shown.err.splitlines() if "data.max_prompt_length" in line]
    assert len(told) == (2 if fate else 0)
    for line, name in zip(told, (f"base {tmp_path}/base", "run step 4"), strict=False):
        says(line, name, LIMIT, fate, f"{tmp_path}/val.jsonl, line 2")


def test_rows_of_the_users_own_are_asked_whole(tmp_path: Path, call: Call) -> None:
    a_run(tmp_path, LIMIT)
    run_dir, rows = str(tmp_path / "run"), str(tmp_path / "val.jsonl")
    assert json.loads(call("eval", run_dir, ENGINE, "--data", rows, "--json").out)[0]["prompts"] == 3
    shown = call("generate", run_dir, ENGINE, "--prompts", rows)
    assert len(shown.out.splitlines()) == 3
    assert "left out" not in shown.err
    shown = call("generate", run_dir, ENGINE, "--prompts", rows, "--max-model-len", "60")
    assert len(shown.out.splitlines()) == 2
    says(shown.err, "--max-model-len", 60, f"{rows}, line 2")
    said = call("generate", run_dir, ENGINE, "--prompts", rows, "--max-model-len", "3", code=2)
    says(said.err, "--max-model-len", 3, f"{rows}, line 1")


def test_an_agent_loops_tools_are_not_in_the_prompts(tmp_path: Path, call: Call) -> None:
    agent = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    a_run(tmp_path, agent)
    says(call("eval", tmp_path / "run", ENGINE).err, agent, "data.max_prompt_length")
