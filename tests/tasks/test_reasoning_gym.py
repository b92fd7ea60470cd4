"""Rows and scores of Reasoning Gym: with a made-up package of its form, and with the real one where it is installed."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_dist.data.conversion import write_splits
from grpo_dist.errors import ConfigError
from grpo_dist.rewards import check_data_sources
from grpo_dist.rewards.contract import RewardResult
from grpo_dist.tasks import reasoning_gym
from grpo_dist.tasks.prepare import main
from tests.messages import refuses, says
from tests.rewards.scoring import scored as built_in_scored


@dataclasses.dataclass
class Config:
    largest: int = 1000
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert self.largest > 0, "positive"


class Doubles:
    """Asks for the double of seed + index; the scorer needs a tuple, pays a half for text with the answer in it."""

    def __init__(self, config: Config) -> None:
        config.validate()
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = (self.config.seed + index) % self.config.largest
        return {"question": f"2*{number}", "answer": str(2 * number), "metadata": {"right": (str(2 * number),)}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        right = entry["metadata"].pop("right")  # of this entry alone
        if answer == "?":
            raise ValueError("no number")
        return 1.0 if (answer,) == right else 0.5 if right[0] in answer else 0.0


class Halves(Doubles): ...


class Broken(Doubles):
    def __init__(self, config: Config) -> None:
        raise AttributeError("no 'name'")


class Lazy(Doubles):
    """Looks at its settings when an entry is made."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise IndexError(self.config.largest)


class Objects(Doubles):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": "?", "answer": "1", "metadata": object()}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of the real one's form."""
    top, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    top.__spec__ = ModuleSpec("reasoning_gym", None)
    tasks = {"doubles": Doubles, "halves": Halves, "countdown": Doubles, "composite": Broken, "broken": Broken}
    factory.DATASETS = {name: (task, Config) for name, task in (tasks | {"lazy": Lazy, "objects": Objects}).items()}
    factory.create_dataset = lambda name, **settings: factory.DATASETS[name][0](Config(**settings))
    monkeypatch.setitem(sys.modules, "reasoning_gym", top)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    reasoning_gym._dataset.cache_clear()
    yield factory
    reasoning_gym._dataset.cache_clear()


def make(folder: Path, *arguments: str, train: int = 1, test: int = 1) -> dict[str, list[dict[str, Any]]]:
    sizes = f"--train_size={train}", f"--test_size={test}"
    assert main(["reasoning_gym", "--local_save_dir", str(folder), *sizes, "--task", *arguments]) == 0
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def scored(row: dict[str, Any], response: str) -> RewardResult:
    reasoning_gym._dataset.cache_clear()
    extra_info = json.loads(json.dumps(row["extra_info"]))
    return built_in_scored(response, row["reward_model"]["ground_truth"], row["data_source"], extra_info)


def test_rows_and_numbers_of_numpy(package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make(tmp_path, "doubles", "--seed=7", "--instruction=Go.", train=4, test=2)
    assert rows["test"][1]["prompt"] == [{"role": "user", "content": "2*8\n\nGo."}]
    assert rows["test"][1]["data_source"] == "reasoning_gym/doubles"
    truths = [row["reward_model"]["ground_truth"] for row in rows["train"]]
    assert truths == ["18", "20", "22", "24"], "none of the test"
    again = make(tmp_path, "doubles", "--seed=7", "--instruction=", train=4, test=2)
    assert [row["extra_info"] for row in again["train"]] == [row["extra_info"] for row in rows["train"]]
    assert again["train"][0]["prompt"] == [{"role": "user", "content": "2*9"}]
    (row,) = make(tmp_path, "countdown", "--allow_eval")["train"]
    assert row["data_source"] == "reasoning_gym/countdown"
    made = {"question": "2*1", "answer": "2", "metadata": {"right": (np.str_("2"),), "odd": np.float64(0.5)}}
    monkeypatch.setattr(Halves, "__getitem__", lambda self, index: {**made, "question": f"2*1, {index}"})
    (row,) = make(tmp_path, "halves")["train"]
    assert scored(row, "<answer>2</answer>").score == 1.0


def test_a_mixture(package: ModuleType, tmp_path: Path) -> None:
    """Three of four rows are to be of one task; of 400 draws 300 are, give or take 9."""
    tasks = ["halves", "{doubles: {weight: 3, largest: 390}}"]
    rows = make(tmp_path, *tasks, train=350, test=50)
    doubles = [row for row in rows["train"] + rows["test"] if row["data_source"] == "reasoning_gym/doubles"]
    assert 240 < len(doubles) < 340
    assert {json.loads(row["extra_info"]["settings"])["largest"] for row in doubles} == {390}
    questions = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert not questions["train"] & questions["test"]
    assert len(rows["train"]) < 350, "questions of the test are left out"
    for row in rows["test"][:10]:
        assert scored(row, row["extra_info"]["completion"]).score == 1.0


def test_the_answer_is_scored_and_nothing_else(package: ModuleType, tmp_path: Path) -> None:
    (row,) = make(tmp_path, "doubles", "--seed=6")["train"]
    for response, score, acc, unreadable, pred in (
        ("<answer>14</answer>", 1.0, 1.0, 0.0, "14"),
        ("<answer>13</answer> no, <answer> 14 </answer>.", 1.0, 1.0, 0.0, "14"),
        ("7+7=14 #### 14", 1.0, 1.0, 0.0, "14"),
        ("<answer>13 14</answer>", 0.5, 0.0, 0.0, "13 14"),  # the task's own scale
        ("<answer>13</answer> #### 14", 0.0, 0.0, 0.0, "13"),
        ("14", 0.0, 0.0, 0.0, None),
        ("####", 0.0, 0.0, 0.0, None),
        ("<answer>?</answer>", 0.0, 0.0, 1.0, "?"),
    ):
        for _ in range(2):  # the entry is as it was
            result = scored(row, response)
            assert (result.score, result.extra, result.pred) == (score, {"acc": acc, "unreadable": unreadable}, pred)


def test_what_cannot_be_made(package: Any, tmp_path: Path, capsys: Any) -> None:
    for arguments, words in (
        (["dubbles"], ["--task dubbles", "doubles"]),
        (["{doubles: {largest: 0}}"], ["--task doubles", "positive"]),
        (["{doubles: {biggest: 3}}"], ["'biggest'", "largest, seed, size"]),
        (["{composite: {datasets: [{name: doubles, weight: 1}]}}"], ["--task composite", "{weight: 2}"]),
        (["{broken: {}}"], ["--task broken", "'name'"]),
        (["{lazy: {largest: 3}}"], ["--task lazy", '"largest": 3', "entry 0", "IndexError"]),
        (["objects"], ["--task objects", "entry 0"]),
        (["{doubles: {weight: 0}}"], ["--task {doubles: {weight: 0}}", "weight"]),
        (["{doubles: {weight: much}}"], ["NAME", "weight: 2"]),
        (["{doubles: {}, halves: {}}"], ["NAME"]),
        (["{doubles"], ["--task {doubles"]),
        (["doubles", "countdown"], ["--task countdown", "--allow_eval"]),
        (["{doubles: {largest: 5}}", "--test_size=5"], ["--test_size=5"]),
        (["doubles", "--train_size=0"], ["--train_size=0"]),
    ):
        assert main(["reasoning_gym", f"--local_save_dir={tmp_path}", "--train_size=20", "--task", *arguments]) == 2
        says(capsys.readouterr().err, *words)
        assert list(tmp_path.iterdir()) == []


def test_without_the_package(package: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Neither rows are made nor does a run start with rows that are there."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._dataset.cache_clear()
    assert main(["reasoning_gym", "--local_save_dir", str(tmp_path), "--task", "chain_sum"]) == 2
    says(capsys.readouterr().err, "grpo_dist[reasoning-gym]")
    with refuses(ConfigError, "grpo_dist[reasoning-gym]"):
        check_data_sources(["reasoning_gym/chain_sum"])


SCORE = """
import json, sys
from grpo_dist.tasks.reasoning_gym import compute_score
ODD = ["7", "hello", "[1, 2]", "{}", "1,2;3\\n4 5 6", "((1)", "a b -> c", "None", "0/0"]
found = {}
for line in sys.stdin:
    extra = json.loads(line)
    own = compute_score("", extra["completion"] or "", "", extra)["score"]
    odd = [compute_score("", f"<answer>{text}</answer>", "", extra)["unreadable"] for text in ODD]
    found.setdefault(extra["task"], []).append([own, sum(odd)])
print(json.dumps(found))
"""
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.mark.long
@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the package: pip install reasoning-gym")
def test_every_task_of_the_real_package(tmp_path: Path) -> None:
    """Own answers score 1 in another process, with other hashes, but where the package gives none."""
    from reasoning_gym.factory import DATASETS

    tasks = sorted(DATASETS.keys() - {"composite"})
    rows = [reasoning_gym._make_row(task, '{"seed": 3, "size": 40}', i, "") for task in tasks for i in range(2)]
    write_splits({"train": rows}, str(tmp_path))
    extras = [row["extra_info"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()]
    lines = "".join(json.dumps(extra) + "\n" for extra in extras)
    done = subprocess.run([sys.executable, "-c", SCORE], input=lines, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {task for task, scores in found.items() if any(own != 1.0 for own, _ in scores)} == WITHOUT_ANSWER
    refused = {task for task, scores in found.items() if any(odd for _, odd in scores)}
    assert refused == {"boxnet", "game_of_life", "prime_factorization"}
    assert {extra["task"] for extra in extras if extra["completion"] is None} == WITHOUT_ANSWER


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the package: pip install reasoning-gym")
def test_no_other_scorer_of_the_real_package_runs_answers() -> None:
    """Told by the scorers' source: eval and sympy's parser, called with the answer."""
    from reasoning_gym.factory import DATASETS

    scorers = {name: inspect.getsource(made.score_answer) for name, (made, _) in DATASETS.items()}
    runs = re.compile(r"(?<![\w_])(?:eval|exec|parse_expr|sympify)\(answer\b")
    assert {name for name, source in scorers.items() if runs.search(source)} == reasoning_gym.EVALUATING
