"""`grpo_dist.train` before anything starts: what becomes of objects, and what is refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import grpo_dist
from grpo_dist import api
from grpo_dist.data import load_prompts
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plugins.registry import load_attribute
from tests.messages import refuses, says
from tests.pictures import image

SMALL = {"data": "arithmetic", "data.train_batch_size": 2, "actor_rollout_ref.actor.ppo_mini_batch_size": 2}
ROWS = [{"data_source": "mine", "prompt": "1+1=?", "reward_model": {"ground_truth": "2"}}] * 2


def length(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return float(len(solution_str))


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_run", lambda keys, callbacks: found.update(keys))
    return found


def test_nothing_but_what_is_said_is_set(given: dict[str, Any], tmp_path: Path) -> None:
    grpo_dist.train()
    assert given == {}
    grpo_dist.train("models/mine", "rewards.py:right", "rows.parquet", config={"trainer": {"seed": 3}, "model": "hf"})
    assert given == {
        "model": "hf",
        "actor_rollout_ref.model.path": "models/mine",
        "custom_reward_function.path": "rewards.py:right",
        "data.train_files": "rows.parquet",
        "trainer": {"seed": 3},
    }
    given.clear()
    grpo_dist.train("tiny")
    assert given == {"model": "tiny"}, "an option of its group, where there is no such folder"
    given.clear()
    (tmp_path / "tiny").mkdir()
    grpo_dist.train("tiny", config={"data": "gsm8k"})
    assert given == {"actor_rollout_ref.model.path": "tiny", "data": "gsm8k"}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("models/mine", {}),
        ("models/mine", {"data.seed": 3, "model": "hf"}),
        ("org/mine", {"data": {"val_files": "rows.jsonl"}}),
        (None, {"actor_rollout_ref": {"model": {"path": "models/mine"}}}),
    ],
)
def test_rows_for_an_own_model_are_asked_for(model: str | None, config: dict[str, Any], given: dict[str, Any]) -> None:
    with refuses(ConfigError, "train_dataset", "data.train_files"):
        grpo_dist.train(model, length, config=config)
    assert given == {}
    grpo_dist.train(model, length, config=config | {"data": "arithmetic"})
    assert given["data"] == "arithmetic"


def test_what_is_no_model_no_row_and_no_callback_is_answered(given: dict[str, Any]) -> None:
    for model in (torch.nn.Linear(1, 1), torch.nn.Linear):
        with refuses(ConfigError, "model=Linear", "save_pretrained(FOLDER)"):
            grpo_dist.train(model)  # type: ignore[arg-type]
    with refuses(ConfigError, "rollout.agent.agent_kwargs", "FILE.py:NAME"):
        grpo_dist.train(config={"actor_rollout_ref.rollout.agent.agent_kwargs": {"tools": [refuses]}})
    with refuses(ConfigError, "num_generations", "actor_rollout_ref.rollout.n", "args", "config={KEY: VALUE}"):
        grpo_dist.train("tiny", num_generations=8, args=None)
    with refuses(ConfigError, "config=Linear", "config={KEY: VALUE}"):
        grpo_dist.train("tiny", config=torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with refuses(ConfigError, "callbacks=Stop", "TrainerCallback"):
        grpo_dist.train(callbacks=[type("Stop", (), {})()])
    with refuses(DataError, "data.val_files", "easy", "hard"):
        grpo_dist.train(eval_dataset={"easy": ROWS, "hard": ROWS})  # type: ignore[arg-type]
    with refuses(DataError, "data.train_files", "row 2", "object"):
        grpo_dist.train(train_dataset=[*ROWS, {"prompt": object()}])
    assert given == {}


class Game:
    def reset(self) -> None: ...

    def go(self) -> str:
        """Go."""
        return "gone"


def test_a_class_becomes_the_environment_of_the_tool_agent(given: dict[str, Any]) -> None:
    grpo_dist.train(environment_factory=Game)
    named = given["actor_rollout_ref.rollout.agent.agent_kwargs.environment"]
    assert given["actor_rollout_ref.rollout.agent.default_agent_loop"] == "tool_agent"
    assert load_attribute(named, key="key")().go() == "gone"
    given.clear()
    agent = {"default_agent_loop": "mine.py:Loop"}
    grpo_dist.train(environment_factory="mine.py:Game", config={"actor_rollout_ref": {"rollout": {"agent": agent}}})
    assert [name for name in given if "agent" in name] == ["actor_rollout_ref.rollout.agent.agent_kwargs.environment"]
    for factory in (lambda: Game(), {"game": Game}):
        with refuses(ConfigError, "environment_factory", "class"):
            grpo_dist.train(environment_factory=factory)  # type: ignore[arg-type]
    both = {"actor_rollout_ref.rollout.agent.agent_kwargs": {"environment": "mine.py:Game"}}
    with refuses(ConfigError, "environment_factory", "agent_kwargs.environment"):
        grpo_dist.train(environment_factory=Game, config=both)


def test_a_result_is_shown_in_three_lines(tmp_path: Path) -> None:
    metrics = [{"step": 0.0}, *({"step": i, "critic/score/mean": 0.25 * i} for i in (1.0, 2.0))]
    result = grpo_dist.TrainingResult(tmp_path / "run", tmp_path / "model", metrics)
    assert len(repr(result).splitlines()) == 3
    says(repr(result), "2 training steps", "0.25 -> 0.5", tmp_path / "run", tmp_path / "model")
    assert "reward" not in repr(grpo_dist.TrainingResult(tmp_path, None, []))


def test_a_typo_is_told_before_anything_is_written_and_its_traceback_ends_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refuses(ConfigError, "trainer.total_steps", "trainer.total_training_steps") as refused:
        grpo_dist.train(reward_funcs=length, train_dataset=ROWS, config={"trainer.total_steps": 5})
    assert refused.traceback[-1].name == "train"
    assert refused.value.__suppress_context__
    assert not list(tmp_path.iterdir())


def test_images_of_rows_are_there_for_the_policy_and_for_functions(given: dict[str, Any]) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 8, 3), np.uint8))
    train: Any = grpo_dist.train
    train(train_dataset=[{**ROWS[0], "images": [picture, image(1)]}], config={"trainer.default_local_dir": "mine"})
    read: dict[str, Any] = {"key": "data.train_files", "max_samples": -1, "shuffle_seed": None}
    (prompt,) = load_prompts([given["data.train_files"]], **read, image_key="images", kept=("images",))
    assert prompt.messages[0]["content"] == "<image><image>1+1=?"
    seen = pickle.loads(pickle.dumps(prompt.columns["images"]))
    assert (np.asarray(seen[0]) == np.asarray(picture)).all()
    assert [each.size for each in seen] == [each.size for each in seen[:]] == [(8, 9), (28, 28)]


def test_functions_and_rows_are_written_into_the_runs_folder(given: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**ROWS[0], "extra_info": {"number": np.int64(1), "vector": np.ones(2)}}]
    functions = [length, length, "rewards.py:right"]
    grpo_dist.train(reward_funcs=functions, train_dataset=rows, config={"trainer.default_local_dir": "mine"})
    file = Path(given["data.train_files"])
    assert (file.parents[1], file.name) == (tmp_path / "mine/rows", "train.jsonl"), "metrics name the file"
    assert json.loads(file.read_text()) == {**ROWS[0], "extra_info": {"number": 1, "vector": [1.0, 1.0]}}
    specs = given["custom_reward_function.path"]
    assert [spec.rpartition(":")[2] for spec in specs] == ["length", "length_2", "right"]
    assert load_attribute(specs[1], key="key")("mine", "four", "", {}) == 4.0
    assert specs[2] == "rewards.py:right"
    files = []
    for rows in (ROWS, [*ROWS, *ROWS], ROWS):
        grpo_dist.train(train_dataset=rows, config={"trainer.default_local_dir": "mine"})
        files.append(Path(given["data.train_files"]))
    assert files[0] == files[2], "the same rows are the same experiment"
    assert [len(file.read_text().splitlines()) for file in files[:2]] == [len(ROWS), 2 * len(ROWS)]

    # As pandas has it, whose iteration gives the names of columns.
    class Table:
        columns = ("prompt",)

        def to_dict(self, orient: str) -> list[dict[str, str]]:
            assert orient == "records"
            return [{"prompt": "1+1=?"}]

    grpo_dist.train(eval_dataset=Table(), config={"trainer.default_local_dir": "mine"})  # type: ignore[arg-type]
    assert Path(given["data.val_files"]).read_text() == '{"prompt": "1+1=?"}\n'


@pytest.mark.parametrize(
    ("given", "config", "key"),
    [
        ({"model": "models/mine"}, {"actor_rollout_ref.model.path": "other"}, "actor_rollout_ref.model.path"),
        ({"model": "models/mine"}, {"actor_rollout_ref": {"model.path": "other"}}, "actor_rollout_ref.model.path"),
        ({"model": "tiny"}, {"+model": "hf"}, "model"),
        ({"reward_funcs": length}, {"custom_reward_function": {"path": "mine.py:f"}}, "custom_reward_function.path"),
        ({"train_dataset": ROWS}, {"data.train_files": "rows.jsonl"}, "data.train_files"),
        ({"eval_dataset": ROWS}, {"data": {"val_files": None}}, "data.val_files"),
    ],
)
def test_what_an_argument_and_the_config_both_set_is_refused(
    given: dict[str, Any], config: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refuses(ConfigError, *given, key, "config"):
        grpo_dist.train(**given, config=config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dry_run", [True, "config"])
def test_a_dry_run_trains_nothing(
    dry_run: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("grpo_dist.run.run.run", lambda *arguments: pytest.fail("it trains"))
    config = SMALL | {"trainer": {"default_local_dir": str(tmp_path), "dry_run": dry_run}}
    assert grpo_dist.train(config=config) == grpo_dist.TrainingResult(tmp_path, None, [])
    told = capsys.readouterr().out
    says(told, "data.train_batch_size=2")
    assert ("checked on this machine" in told) == (dry_run is True)
    assert not list(tmp_path.iterdir())
    with refuses(ConfigError, "trainer.seed=-1"):
        grpo_dist.train(config=config | {"trainer.seed": -1})
    if dry_run is True:  # which looks at files
        judge = {"custom_reward_function.path": ["rewards.py:f", "org/judge"]}
        with refuses(ConfigError, "org/judge", "reward_model.enable=true", "reward_model.model.path=org/judge"):
            grpo_dist.train(config=config | judge)
