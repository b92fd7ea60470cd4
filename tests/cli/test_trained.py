"""What `RUN_OR_MODEL` names: runs, checkpoints and folders, and how each is asked; what a fork goes on with."""

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import grpo_dist.cli.trained as trained
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import FILE, Usage, read_usage
from grpo_dist.cli.evaluate import _models
from grpo_dist.cli.replay import weights_before
from grpo_dist.cli.trained import base_of, engine_for, find_trained, given_prompts
from grpo_dist.config.keys import flatten
from grpo_dist.config.run_code import FLAG
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.run import run as run_module
from grpo_dist.runs import Recorded
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.trainer.checkpoint.folder import LATEST, begin_checkpoint, own_checkpoints, publish_checkpoint
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest
from grpo_dist.trainer.loop import exported_usage
from grpo_dist.trainer.record import write_config
from tests.cli.conftest import Call
from tests.cli.test_export import TINY, are_equal, checkpoint, tensors
from tests.config.read_back import read_back
from tests.messages import refuses, says
from tests.trainer.checkpoints import exported_model, run_state


def find(run: Path, overrides: Sequence[str] = (), step: int | None = None) -> trained.TrainedModel:
    return find_trained(str(run), overrides, step=step)


def refused(run: Path, *parts: object, step: int | None = None) -> None:
    with refuses(ConfigError, *parts):
        find(run, step=step)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.deep
def test_a_run_is_asked_as_it_validates(run_dir: Path) -> None:
    whole = checkpoint(run_dir, "grpo")
    last = find(run_dir)
    assert (last.folder, last.name, last.usage.step) == (run_dir / "huggingface_step_4", "run step 4", 4)
    assert last.usage.sampling == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 64, "stop": ()}
    assert read_usage(last.folder).sampling == dict(last.usage.sampling) | {"stop": []}
    assert last.config.actor_rollout_ref.model.path == str(last.folder)
    assert are_equal(tensors(last.folder), tensors(whole))
    base = base_of(last)
    assert (base.folder, base.name, base.usage.step) == (Path(resolve_model_path(TINY)), f"base {TINY}", None)
    assert base.usage.sampling == last.usage.sampling

    written = (last.folder / "model.safetensors").stat().st_mtime_ns
    again = find(run_dir / "global_step_4", ["data.system_prompt=Be brief.", "data.max_response_length=8"])
    told = again.usage.system_prompt, again.usage.sampling["max_tokens"]
    assert (again.folder, *told) == (last.folder, "Be brief.", 8)
    assert (last.folder / "model.safetensors").stat().st_mtime_ns == written  # not exported once more
    refused(run_dir, "--step 3", run_dir, "steps 2, 4", step=3)


def test_the_model_of_a_fine_tuned_run_is_asked_with_its_template(run_dir: Path) -> None:
    checkpoint(run_dir, "sft")
    found = find(run_dir)
    assert found.usage == Usage(4, checkpoint=checkpoint_digest(run_dir / "global_step_4"), dtype="fp32")
    assert found.base is None
    with refuses(ConfigError, "--base", found.name):
        base_of(found)


def test_a_folder_says_how_it_is_asked(tmp_path: Path) -> None:
    sampling = {"temperature": 0.7, "stop": ["end"]}
    usage = Usage(3, "Be brief.", {"enable_thinking": False}, sampling, apply_chat_template=False)
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 100}')
    usage.write(folder)
    found = find(folder)
    assert (found.usage, found.name) == (usage, str(folder))
    assert [prompt.is_plain for prompt in given_prompts(found, ["1+1="])[0]] == [True]
    assert engine_for(found).rollout.kv_cache_memory_gib is None, "not the built-in model's"
    assert [engine_for(found, most).max_model_len for most in (None, 50)] == [100, 50]
    with refuses(ConfigError, "--max-model-len 101", "max_position_embeddings", "100"):
        engine_for(found, 101)

    (folder / FILE).write_text(json.dumps({"steps": 3}))
    with refuses(DataError, folder / FILE, "steps"):
        find(folder)


def test_a_run_of_another_folder_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = Path("outputs/grpo_dist/words")
    run_dir.mkdir(parents=True)
    write_config(load_config([])[0], run_dir)
    with refuses(ConfigError, "outputs/words", f" {run_dir}?"):
        find_trained("outputs/words")


# --- which checkpoint, and whose model -----------------------------------------------------------------------------
def a_run(run_dir: Path, seed: int, steps: Sequence[int], *overrides: str) -> Any:
    """A run that starts anew in a folder and writes checkpoints after these steps; returns its config."""
    config, _ = load_config([f"trainer.seed={seed}", f"trainer.default_local_dir={run_dir}", *overrides])
    run_dir.mkdir(exist_ok=True)
    write_config(config, run_dir)
    (run_dir / LATEST).unlink(missing_ok=True)
    history: list[str] = []
    for step in steps:
        state = replace(run_state(step), history=[*history])
        folder = publish_checkpoint(begin_checkpoint(run_dir, step), state, saved_config(config))
        history.append(checkpoint_digest(folder))
    return config


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def export(checkpoint: Path, config: Any, folder: Path, dtype: str) -> None:
        found.append(checkpoint.name)
        shutil.copytree(resolve_model_path(TINY), folder)
        exported_usage(make_plan(config), int(checkpoint.name.rpartition("_")[2]), dtype, checkpoint).write(folder)

    monkeypatch.setattr(trained, "export_checkpoint", export)
    return found


@pytest.mark.deep
def test_a_run_that_starts_anew_in_a_folder_is_not_the_one_before(run_dir: Path, exports: list[str]) -> None:
    first = a_run(run_dir, 1, [1, 4])
    exported_model(run_dir / "huggingface", first, 4, run_dir / "global_step_4")
    assert find(run_dir).folder == run_dir / "huggingface"
    by_hand = find(run_dir, step=1).folder
    assert by_hand == run_dir / "huggingface_step_1"

    a_run(run_dir, 2, [1])
    for step in (1, None):
        refused(run_dir, by_hand / FILE, run_dir / "global_step_1", step=step)
    by_hand.rename(run_dir.parent / "kept")
    exports.clear()
    for step in (1, None):
        found = find(run_dir, step=step)
        assert (found.folder, found.name, found.config.trainer.seed) == (by_hand, "run step 1", 2)
    assert exports == ["global_step_1"]
    refused(run_dir, "--step 4", "steps 1", run_dir / "global_step_4", step=4)
    named = find(run_dir / "global_step_4")
    assert (named.folder, named.config.trainer.seed) == (run_dir / "huggingface", 1)
    refused(run_dir / "global_step_4", "--step 1", run_dir / "global_step_4", step=1)


def test_the_last_one_is_the_one_that_the_pointer_names(run_dir: Path, exports: list[str]) -> None:
    config = a_run(run_dir, 1, [1, 2, 4])
    exported_model(run_dir / "huggingface", config, 4, run_dir / "global_step_4")
    (run_dir / LATEST).write_text("2")
    assert find(run_dir).name == "run step 2"
    assert exports == ["global_step_2"]
    assert list(own_checkpoints(run_dir)) == [1, 2]
    refused(run_dir, "--step 4", "steps 1, 2", "global_step_4", step=4)
    write_config(config, run_dir)  # another start of the same command
    for text in (None, "9", "x"):  # not copied along; names what is not there; damaged
        (run_dir / LATEST).unlink() if text is None else (run_dir / LATEST).write_text(text)
        for step in (None, 2):
            refused(run_dir, run_dir / LATEST, run_dir / "global_step_4", step=step)


def test_a_model_without_a_checkpoint_is_of_the_run_that_wrote_it(run_dir: Path, exports: list[str]) -> None:
    """Not of one that is at work in its folder; a copy is the same run: here the model is the oldest file."""
    config = a_run(run_dir, 1, [])
    exported_model(run_dir / "huggingface", config, 4, None)
    assert find(run_dir).name == find(run_dir, step=4).name == "run step 4"
    refused(run_dir, "--step 3", "trainer.save_freq", step=3)
    a_run(run_dir, 1, [])  # the same command again
    refused(run_dir, run_dir / "huggingface" / FILE, run_dir / "config.yaml", run_dir / "huggingface")
    (run_dir / "huggingface" / FILE).write_text('{"step": 4}')  # of an older version
    refused(run_dir, run_dir / "huggingface" / FILE)
    assert find(run_dir / "huggingface").usage.step == 4

    shutil.rmtree(run_dir)
    exported_model(run_dir / "huggingface", a_run(run_dir, 1, [2, 4]), 4, run_dir / "global_step_4")
    copy = run_dir.parent / "copy"
    shutil.copytree(run_dir / "huggingface", copy / "huggingface", copy_function=shutil.copyfile)
    shutil.copytree(run_dir, copy, copy_function=shutil.copyfile, dirs_exist_ok=True)
    assert find(copy).folder == copy / "huggingface"
    assert exports == []
    (copy / "huggingface" / FILE).write_text('{"step": 4}')  # of an older version: of no checkpoint
    assert find(copy).folder == copy / "huggingface_step_4"
    assert exports == ["global_step_4"]
    for step in (2, 4):
        shutil.rmtree(run_dir / f"global_step_{step}")
    assert find(run_dir).name == "run step 4"


def test_replays_take_own_checkpoints(run_dir: Path, exports: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    a_run(run_dir, 1, [1, 2])
    a_run(run_dir, 2, [1, 4])
    recorded = Recorded(run_dir, 3, *[None] * 3)  # type: ignore[arg-type]
    with refuses(ConfigError, "step 3", "1, 2, 5", run_dir / "global_step_2"):
        weights_before(recorded)
    assert weights_before(replace(recorded, step=5)) == run_dir / "global_step_4"
    options = SimpleNamespace(base=False, all_steps=True, step=None, trust=False)
    with contextlib.ExitStack() as stack:
        models = list(_models([str(run_dir)], [], options, stack))  # type: ignore[arg-type]
        assert [model.name for model in models] == ["run step 1", "run step 4"]
        assert {model.config.trainer.seed for model in models} == {2}
    says(capsys.readouterr().err, run_dir / "global_step_2")
    assert not list(run_dir.glob("huggingface*")), "those that it has made are removed"


# --- forks ---------------------------------------------------------------------------------------------------------
LR, ROLLOUT, SECRET = "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout", "reward_kwargs.api_key"


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configs of forks that would have trained."""
    configs: list[Any] = []
    monkeypatch.setattr(run_module, "run", lambda config, on_forced_end: configs.append(config))
    monkeypatch.setenv("ROWS", "builtin:arithmetic/train")
    return configs


@pytest.mark.deep
def test_a_fork_has_the_runs_config_with_the_change(run_dir: Path, forks: list[Any], call: Call) -> None:
    own = "recipe=ppo", "trainer.push_to_hub=me/mine", "data.train_files='${oc.env:ROWS}'", "data.val_files=null"
    a_run(run_dir, 1, [2], *own, "+custom_reward_function.reward_kwargs={b.c: 1}")
    files = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    saved = read_back((run_dir / "global_step_2/config.yaml").read_text())
    before, place = dict(flatten(saved.model_dump(mode="json"))), "run-fork-2-lr=0.5"
    given = [f"{LR}=0.5", "trainer.total_training_steps=9", "ray_kwargs.ray_init.address=local"]
    call("fork", run_dir / "global_step_2", *given)
    start = {"resume_mode": "resume_path", "resume_from_path": f"{run_dir}/global_step_2", "total_training_steps": 9}
    start |= {"push_to_hub": None, "experiment_name": place, "default_local_dir": f"{run_dir.parent}/{place}"}
    now, expected = flatten(forks[0].model_dump(mode="json")), {LR: 0.5, "ray_kwargs.ray_init.address": "local"}
    expected |= {f"trainer.{key}": value for key, value in start.items()}
    assert {key: value for key, value in now if before[key] != value} == expected
    assert "${oc.env:ROWS}" in saved_config(forks[0])
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == files


def test_a_fork_goes_on_and_touches_no_other_run(run_dir: Path, forks: list[Any], call: Call) -> None:
    a_run(run_dir, 1, [2, 4])
    command = ["fork", str(run_dir), "--step", "2", "trainer.experiment_name=mine", f"{LR}=0.5"]
    call(*command)
    state = replace(run_state(5), history=[checkpoint_digest(run_dir / "global_step_2")])
    publish_checkpoint(begin_checkpoint(run_dir.parent / "mine", 5), state, saved_config(forks[0]))
    (run_dir.parent / "mine/metrics.jsonl").write_text('{"step": 3}')
    call(*command)
    assert (forks[1].trainer.resume_mode, forks[1].trainer.resume_from_path) == ("auto", None)
    for step, name in (("4", "mine"), ("2", "run")):
        told = call("fork", run_dir, "--step", step, f"trainer.experiment_name={name}", code=2).err
        says(told, run_dir.parent / name, "trainer.experiment_name")
    assert len(forks) == 2


def test_what_cannot_be_forked(run_dir: Path, forks: list[Any], call: Call) -> None:
    code = Path(__file__).with_name("scripted.py")
    kwargs = f"{ROLLOUT}.agent.agent_kwargs={{environment: '{code}:Game', tool_parser: hermes}}"
    named = [f"trainer.logger=['{code}:Log']", kwargs]
    a_run(run_dir, 1, [2, 4], *named, f"{ROLLOUT}.agent.default_agent_loop=tool_agent")
    a_run(run_dir.parent / "hidden", 1, [2], f"+custom_reward_function.{SECRET}=hush")
    checkpoint(run_dir.parent / "sft", "sft")
    refused: dict[tuple[Any, ...], list[Any]] = {
        (run_dir, "--step=3", FLAG): ["--step 3", "2, 4"],
        (run_dir, "trainer.seed=7", FLAG): ["trainer.seed: 1 -> 7"],
        (run_dir, "data.shuffle=false", FLAG): ["data.shuffle: true -> false"],
        (run_dir, "recipe=dapo", FLAG): ["KEY=VALUE"],
        (run_dir, "data.train_batch_size=7", FLAG): ["data.train_batch_size=7", "actor.ppo_mini_batch_size=32"],
        (run_dir,): [f"{code}:Log", f"{code}:Game", FLAG],
        (run_dir.parent / "hidden",): [SECRET, "KEY=VALUE"],
        (run_dir.parent / "sft",): [run_dir.parent / "sft/global_step_4", "grpo-dist train"],
        (run_dir.parent,): [run_dir.parent, "trainer.save_freq"],
    }
    for given, parts in refused.items():
        says(call("fork", *given, code=2).err, *parts)
    assert not forks
    for trusted in ([FLAG], named):
        call("fork", run_dir, *trusted)


@pytest.mark.deep
def test_a_fork_says_what_keeps_it_from_its_run(tmp_path: Path, forks: list[Any], call: Call) -> None:
    a_run(tmp_path / "run", 1, [2])
    said = []
    changes = [f"{ROLLOUT}.n=4", f"{ROLLOUT}.temperature=0.5", "data.system_prompt=Think", "data.train_batch_size=64"]
    changes += ["trainer.max_staleness=1", "algorithm.filter_groups.enable=true"]
    for keys in ([f"{LR}=0.5"], [*changes, f"{ROLLOUT}.deterministic=false"]):
        told = call("fork", tmp_path / "run", "trainer.console=false", "trainer.experiment_name=b", *keys)
        said.append(told.out.splitlines())
    says(said[0], f"{LR}: 0.0001 -> 0.5")
    says(said[0], f"grpo-dist report {tmp_path}/run --compare {tmp_path}/b")
    assert len(said[1]) == len(said[0]) + 2 * len(changes)
    says(said[1], f"no seeds: {ROLLOUT}.deterministic=false")
