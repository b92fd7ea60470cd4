"""A run's folder does not say what code runs, unless the user says that it may."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.config.load import with_overrides
from grpo_dist.config.run_code import FLAG
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO
from grpo_dist.protocol import DataProto
from grpo_dist.runs import read_recorded
from grpo_dist.trainer.checkpoint.config_changes import digest_code, saved_config
from grpo_dist.trainer.checkpoint.folder import begin_checkpoint, publish_checkpoint
from grpo_dist.trainer.record import EXPORTED, write_config
from tests.cli.conftest import Call
from tests.cli.scripted import ENGINE, SCRIPT
from tests.messages import refuses, says
from tests.tiers import first
from tests.trainer.checkpoints import exported_model, run_state

TRUST = "actor_rollout_ref.model.trust_remote_code=true"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
REWARD = "custom_reward_function.path"
ROW = {"data_source": "mine", "prompt": "1+1=?", "reward_model": {"ground_truth": "2"}}
MARK = "code_ran"

ASKING = {"generate": ["--prompts", "1+1=?"], "eval": [], "serve": ["--port", "0"]}
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Makes a run's folder with these keys, a reward function beside it, and rows; all code leaves a file."""
    monkeypatch.chdir(tmp_path)
    runs = f"open({str(tmp_path / MARK)!r}, 'w')\n"
    Path("reward.py").write_text(f"{runs}def compute_score(**row):\n    return 1.0\n")
    Path("rows.jsonl").write_text(json.dumps(ROW) + "\n")

    def make(*overrides: str) -> Path:
        run_dir = tmp_path / "run"
        own = [f"trainer.default_local_dir={run_dir}", "data.val_files=rows.jsonl", "data.data_source=mine"]
        config = with_overrides({}, [*own, f"{REWARD}=reward.py", *overrides], GRPO)
        run_dir.mkdir()
        write_config(config, run_dir)
        model = run_dir / EXPORTED
        exported_model(model, config, 4, None)
        (model / SCRIPT).write_text(json.dumps({"": ["2"]}))
        (model / "evil.py").write_text(f"{runs}from transformers import PreTrainedTokenizerFast as Evil\n")
        tokenizer = json.loads((model / "tokenizer_config.json").read_text())
        named = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
        (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | named))
        return run_dir

    return make


@pytest.mark.parametrize("command", first(ASKING, "eval"))
def test_the_engine_takes_nothing_unasked(command: str, folder: Folder, call: Call) -> None:
    run_dir = folder(TRUST, f"{VLLM}.block_size=32", "actor_rollout_ref.rollout.name=evil.py:Engine")
    told = call(command, run_dir, *ASKING[command], code=2).err
    says(told, run_dir / "config.yaml", TRUST, "engine_kwargs={vllm:{block_size:32}}", "evil.py:Engine", FLAG)
    assert REWARD not in told, "no engine asks for that"
    assert not Path(MARK).exists()


def test_scores_need_trust_or_a_function_of_the_users_own(folder: Folder, call: Call) -> None:
    run_dir = folder()
    rows = ["generate", str(run_dir), ENGINE, "--prompts", "rows.jsonl"]
    says(call("eval", run_dir, ENGINE, code=2).err, run_dir / "config.yaml", f"{REWARD}=reward.py", FLAG)
    shown = call(*rows)  # answers are answers
    says(shown.err, run_dir / "config.yaml", f"{REWARD}=reward.py", FLAG)
    assert "scores" not in json.loads(shown.out)
    assert FLAG not in call("generate", run_dir, ENGINE, "--prompts", "1+1=?").err, "nothing is to be scored"
    assert not Path(MARK).exists()
    for said in (FLAG, f"{REWARD}=reward.py"):
        assert json.loads(call(*rows, said).out)["scores"] == [1.0]
        assert json.loads(call("eval", run_dir, ENGINE, said, "--json").out)[0]["reward mean@1"][0] == 1.0
    assert Path(MARK).exists()


@pytest.mark.parametrize("command", first(ASKING, "generate"))
def test_what_the_engine_needs_and_was_not_saved_is_asked_for(command: str, folder: Folder, call: Call) -> None:
    hidden = {"data.apply_chat_template_kwargs": "user_key", f"{VLLM}.hf_overrides": "pass_token"}
    line = [f"{key}={{{name}: abc}}" for key, name in hidden.items()]
    run_dir = folder(*line, "data.system_prompt='*** be brief ***'")
    told = call(command, run_dir, FLAG, *ASKING[command], code=2).err
    says(told, run_dir / "config.yaml", *(f"{key}.{name}" for key, name in hidden.items()), "KEY=VALUE")
    assert "system_prompt" not in told
    says(told := call(command, run_dir, FLAG, line[0], *ASKING[command], code=2).err, f"{VLLM}.hf_overrides.pass_token")
    assert "user_key" not in told


@pytest.mark.deep
def test_a_score_needs_what_was_not_saved(folder: Folder, call: Call) -> None:
    Path("reward.py").write_text("def compute_score(key, **row):\n    return 1.0 * (key == 'answer')\n")
    key = "custom_reward_function.reward_kwargs.key"
    run_dir = folder(f"+{key}=answer")
    says(call("eval", run_dir, ENGINE, FLAG, code=2).err, run_dir / "config.yaml", key, "KEY=VALUE")
    shown = call("generate", run_dir, ENGINE, FLAG, "--prompts", "rows.jsonl")
    says(shown.err, key)
    assert "scores" not in json.loads(shown.out)
    for value, score in (("answer", 1.0), ("other", 0.0)):
        said = call("eval", run_dir, ENGINE, FLAG, f"{key}={value}", "--json")
        assert json.loads(said.out)[0]["reward mean@1"][0] == score


@pytest.mark.deep
def test_an_export_loads_own_code_only_with_trust(folder: Folder, call: Call) -> None:
    run_dir = folder(TRUST)
    saved = saved_config(with_overrides({}, [TRUST], GRPO))
    publish_checkpoint(begin_checkpoint(run_dir, 4), run_state(4), saved)
    says(call("export", run_dir, code=2).err, run_dir / "global_step_4/config.yaml", TRUST, FLAG)
    assert TRUST not in call("export", run_dir, FLAG, code=1).err, "the checkpoint is empty"


@pytest.fixture
def stepped(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr("grpo_dist.runs.read_parquet", lambda path: DataProto())

    def make(*overrides: str) -> Path:
        run_dir = folder(*overrides)
        (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
        (run_dir / "rollouts").mkdir()
        (run_dir / "rollouts/1.parquet").touch()
        return run_dir

    return make


@pytest.mark.deep
def test_a_replay_takes_what_was_not_saved_if_it_is_what_the_run_had(stepped: Folder) -> None:
    key = "custom_reward_function.reward_kwargs.key"
    others = "actor_rollout_ref.rollout.agent.agent_kwargs={api_key: not-needed}"
    run_dir = stepped(f"+{key}=answer", others)
    with refuses(ConfigError, run_dir / "config.yaml", key, "KEY=VALUE"):
        read_recorded(run_dir, 1, trust=True)
    for given in (f"{key}=other", "custom_reward_function.reward_kwargs={key: other}"):
        found = read_recorded(run_dir, 1, (given,), trust=True)
        assert found.config.custom_reward_function.reward_kwargs == {"key": "other"}
    with refuses(ConfigError, "custom_reward_function.reward_kwargs.more: (not set) -> 1"):
        read_recorded(run_dir, 1, ("custom_reward_function.reward_kwargs={key: other, more: 1}",), trust=True)
    config = with_overrides({}, [f"+{key}=answer", f"{REWARD}=reward.py", others], GRPO)
    state = replace(run_state(1), code=digest_code(config))
    publish_checkpoint(begin_checkpoint(run_dir, 1), state, saved_config(config))
    with refuses(ConfigError, key, run_dir / "global_step_1"):
        read_recorded(run_dir, 1, (f"{key}=other",), trust=True)
    found = read_recorded(run_dir, 1, (f"{key}=answer",), trust=True)
    assert found.config.custom_reward_function.reward_kwargs == {"key": "answer"}


@pytest.mark.deep
def test_a_replay_runs_no_function_unasked(stepped: Folder) -> None:
    estimator = "algorithm.adv_estimator=mine.py:estimate"
    run_dir = stepped(estimator)
    with refuses(ConfigError, run_dir / "config.yaml", estimator, f"{REWARD}=reward.py", FLAG):
        read_recorded(run_dir, 1)
    with refuses(ConfigError, estimator):
        read_recorded(run_dir, 1, (f"{REWARD}=reward.py",))
    assert read_recorded(run_dir, 1, trust=True).config.algorithm.adv_estimator == "mine.py:estimate"
    assert read_recorded(run_dir, 1, (f"{REWARD}=reward.py", estimator)).step == 1, "they are said to be the user's own"
