"""`grpo-dist rehearse`: what it writes before the run, and whole rehearsals."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.cli import rehearse
from grpo_dist.data.prompts import Prompt
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.plan.commands import load_config
from grpo_dist.workers.rehearsal import REPLIES
from tests.cli.conftest import Call
from tests.cli.test_rehearse_mistakes import HERMES, REWARD, TOOL
from tests.engines.train.test_parts import whole_model
from tests.examples.test_examples import EXAMPLES, run_script
from tests.messages import says
from tests.models import builtin_reward_model
from tests.plan.test_shrink import RECIPES, TEACHER

AGENT = "actor_rollout_ref.rollout.agent"


def prompts(truth: Any, **extra: Any) -> SimpleNamespace:
    row = Prompt(3, "arithmetic", [{"role": "user", "content": "12+30=?"}], truth, extra, "line 1")
    return SimpleNamespace(train=[TokenizedPrompt(row, np.array([1], np.int32))])


def replies(folder: Path, rows: SimpleNamespace, *line: str) -> tuple[str, list[str]]:
    """What is said of the replies to row 3, and these as text."""
    config, _ = load_config([*line])
    said = rehearse.write_replies(config, rows, folder)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path, trust_remote_code=False)
    first, most, ids = json.loads((folder / REPLIES).read_text())
    assert (first, most, list(ids)) == (2, 256 if config.actor_rollout_ref.rollout.agent.is_single_turn else 16, ["3"])
    assert all(each[-1] == tokenizer.eos_token_id for each in ids["3"])
    return said, [tokenizer.decode(each[:-1]) for each in ids["3"]]


def test_a_truth_takes_the_form_that_is_paid_for(tmp_path: Path) -> None:
    model = f"actor_rollout_ref.model.path={resolve_model_path('builtin:tiny-qwen3')}"
    rows = "data.train_files=builtin:arithmetic/train"
    said, texts = replies(tmp_path, prompts("42"), model, rows)
    assert texts == ["#### 42"]
    says(said, "ground truth", "#### 42")
    (tmp_path / "reward.py").write_text(f"{REWARD}    return 1 / ('box' not in solution_str)\n")
    own = f"custom_reward_function.path={tmp_path}/reward.py"
    assert replies(tmp_path, prompts("42"), model, rows, own)[1] == ["\\boxed{42}"], "on which the function raises"
    said, texts = replies(tmp_path, prompts(None), model, rows, own, f"{AGENT}.default_agent_loop=single_turn_agent")
    says(said, "42")


def test_a_tool_is_called_as_the_template_writes_calls(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), folder)
    (folder / "chat_template.jinja").write_text(HERMES)
    (tmp_path / "tools.py").write_text(f"{TOOL}    return name\n")
    said, texts = replies(
        tmp_path, prompts("42", solution="12+30=42 #### 42"), f"actor_rollout_ref.model.path={folder}",
        "data.train_files=builtin:arithmetic/train", f"{AGENT}.default_agent_loop=tool_agent",
        f"{AGENT}.agent_kwargs={{tools: [{tmp_path}/tools.py:look], tool_parser: hermes}}",
    )  # fmt: skip
    assert json.loads(texts[0].removeprefix("<tool_call>").removesuffix("</tool_call>")) == {
        "name": "look",
        "arguments": {"name": "text"},
    }
    assert texts[1:] == ["12+30=42 #### 42"]
    says(said, "solution", "1 tools")


def test_services_of_others_are_named_and_may_be_left_out(tmp_path: Path) -> None:
    line = ["actor_rollout_ref.ref.model.endpoint.base_url=https://far.org/v1", "recipe=distill"]
    line += ["actor_rollout_ref.ref.model.endpoint.model=x", "custom_reward_function.path=grpo_dist.rewards.http"]
    config, _ = load_config(
        [*line, "custom_reward_function.reward_kwargs.url=http://judge.org", "trainer.dry_run=config"]
    )
    assert rehearse.services(config) == {
        "actor_rollout_ref.ref.model.endpoint.base_url": "https://far.org/v1",
        "custom_reward_function.reward_kwargs.url": "http://judge.org",
    }
    alone = rehearse.without_services(config, tmp_path)
    assert rehearse.services(alone) == {}
    assert alone.actor_rollout_ref.ref.model.path == config.actor_rollout_ref.model.path
    near, _ = load_config([f"{AGENT}.default_agent_loop=external", f"{AGENT}.agent_kwargs.url=http://localhost:1/play"])
    assert rehearse.services(near) == {}
    config, _ = load_config([f"{AGENT}.default_agent_loop=external", f"{AGENT}.agent_kwargs.url=http://play.org/play"])
    assert rehearse.services(config) == {f"{AGENT}.agent_kwargs.url": "http://play.org/play"}
    alone = rehearse.without_services(config, tmp_path)
    assert alone.actor_rollout_ref.rollout.agent.is_single_turn
    assert rehearse.services(alone) == {}


def rehearsed(call: Call, *line: str) -> dict[str, str]:
    (told,) = (text for text in call("rehearse", "--json", *line).out.splitlines() if text.startswith("[{"))
    return {part["name"].strip(): part["state"] for part in json.loads(told)}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where rehearsals have their folders, of which none is left behind."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # names of sockets are short
    yield tmp_path / "temporary"
    assert list((tmp_path / "temporary").glob("grpo_dist-rehearsal-*")) == []


STAGES = {"reward", "update_actor", "update_weights", "save_checkpoint", "testing", "export and reload"}


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.deep if name == "ppo" else pytest.mark.long) for name in RECIPES]
)
def test_a_recipe_is_rehearsed(recipe: str, call: Call, tmp_path: Path) -> None:
    more = TEACHER.get(recipe, ())
    if "reward_model" in str(more):
        more = (f"reward_model.model.path={builtin_reward_model(tmp_path / 'scorer')}",)
    states = rehearsed(call, f"recipe={recipe}", *more)
    assert set(states.values()) == {"ok"}
    assert set(states) >= STAGES


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_model_with_a_vision_part_is_rehearsed(call: Call, tmp_path: Path) -> None:
    model = whole_model("Idefics3", tmp_path / "model", vocab_size=256, max_position_embeddings=512)
    states = rehearsed(call, f"actor_rollout_ref.model.path={model}", "data=arithmetic")
    assert set(states.values()) == {"ok"}
    assert set(states) >= STAGES


QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False, "eos_token_id": 2,
    "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
OTHERS = {"planner/run", "verifiers/run"}  # two trainings in one; a package that is not here
SCRIPTS = sorted({str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("run*.sh")} - OTHERS)
# The variables by which scripts ask for a model, scripts that make rows, and lengths of prompts cut into bytes.
MODELS = {"run_smollm2_cpu": "SMOLLM2_DIR", "instructions/run": "SMOLLM2_DIR", "tools/run": "TOOLS_MODEL"}
OWN_ROWS = ("code/run", "environment/run", "instructions/run", "planner/run_qwen3-0.6b", "tools/run")
LONG = {"planner/run_qwen3-0.6b": "data.max_prompt_length=900", "tools/run": "data.max_prompt_length=1500"}


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_rehearsed(script: str, tmp_path: Path) -> None:
    """With a model of public shapes, the built-in tokenizer, and sums as rows where it has none of its own."""
    folder = Path(shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "model"))
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    env = {"PLANNER_DATA": str(tmp_path / "rows"), "DATA_DIR": str(tmp_path / "data"), "HF_HUB_OFFLINE": "1"}
    line = [f"actor_rollout_ref.model.path={folder}", "trainer.rehearse=true", *filter(None, [LONG.get(script)])]
    if script in MODELS:
        env[MODELS[script]] = str(folder)
    if "skyworkrm" in script:
        env["REWARD_MODEL_PATH"] = builtin_reward_model(tmp_path / "scorer")
        line.append(f"reward_model.model.input_tokenizer={folder}")
    if (template := (EXAMPLES / script).with_name("chat_template.jinja")).is_file():
        shutil.copy(template, folder)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "huggingface").symlink_to(folder)  # where code/run.sh finds that its warm start is done
    env |= {"START_DIR": str(tmp_path / "start"), "MODEL_DIR": str(tmp_path / "own")}
    if script not in OWN_ROWS:
        line += ["data.train_files=builtin:arithmetic/train", "data.val_files=builtin:arithmetic/validation"]
    told, _ = run_script(EXAMPLES / f"{script}.sh", *line, cwd=tmp_path, **env)
    assert "FAILED" not in told
    says(told, "update_weights", "export and reload")
