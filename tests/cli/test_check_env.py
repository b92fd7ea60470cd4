"""`grpo-dist check-env`: an environment is played without weights, and each planted fault is named by its check."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.checks.own_answers import own_answer
from grpo_dist.cli import check_env, players
from grpo_dist.cli.entry import main
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import ConfigError
from grpo_dist.tasks import folders
from tests.cli import faulty_environments as faulty
from tests.docs.code_blocks import blocks, recorded
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
    assert main(["check-env", *own]) == 1
    shown = capsys.readouterr()
    scored, _, checked = shown.out.partition("\nrewards ")
    _, first, second, third = scored.split("rows.jsonl")
    says(first, "line 1", "'Name a fruit.'", "'apple'", "ground truth", "score      1", "looking")
    says(second, "'3 + 4 = 7'", "solution", "score      1", "length=9", "pred=x")
    says(third, "FAILED", "KeyError", 'raise KeyError("puce")', "red\n\n3 responses", "2 scored", "1 failed", "1 to 1")
    says(checked, "FAILED", "KeyError", "rows.jsonl, line 3")
    assert "Traceback" not in shown.err


@pytest.mark.deep
def test_answers_that_are_given(own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "--row", "1", "--answer", "An apple", *own, "--answer=a pear"]) == 0
    told = capsys.readouterr().out
    says(told, "'An apple'", "--answer", "score      1")
    says(told, "'a pear'", "score      0")
    assert "colour" not in told
    assert main(["check-env", *own, "--rows", "1"]) == 0
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
    assert main(["check-env", *own, *arguments]) == 2
    shown = capsys.readouterr()
    says(shown.err, *parts)
    assert "Traceback" not in shown.err


def test_the_built_in_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "--rows=1", "--answer=943"]) == 0
    says(capsys.readouterr().out, "data_source=arithmetic", "score      0", "--answer")
    assert main(["check-env", "--row=1", "--answer=#### 943"]) == 0
    says(capsys.readouterr().out, "acc=1", "score      1")


def test_where_a_row_has_its_own_answer() -> None:
    def prompt(truth: Any, **extra_info: Any) -> Prompt:
        return Prompt(0, "mine", [{"role": "user", "content": "?"}], truth, extra_info, "rows.jsonl, line 1")

    assert own_answer(prompt("7", answer="so 7"))[0] == "so 7"
    assert own_answer(prompt("7", answer=["no text"]))[0] == "7"
    assert own_answer(prompt({"target": 7}))[0] == '{"target": 7}'
    with refuses(ConfigError, "rows.jsonl, line 1", "--answer TEXT"):
        own_answer(prompt(None))


def test_the_old_name_is_answered_by_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-reward", "--rows=1", "data.train_batch_size=2"]) == 2
    says(capsys.readouterr().err, "grpo-dist check-env --rows=1 data.train_batch_size=2")


# --- what players find ------------------------------------------------------------------------------------------------
LOOP, ENV = "actor_rollout_ref.rollout.agent.default_agent_loop", "tests.cli.faulty_environments"
KWARGS = "actor_rollout_ref.rollout.agent.agent_kwargs"
LONGER = ["model=tiny", "actor_rollout_ref.model.override_config={max_position_embeddings: 1024}"]
SUMS = ["data.train_files=sums.jsonl", f"custom_reward_function.path={faulty.__file__}"]
PAYS = "custom_reward_function.name=right"
QWEN3 = Path(__file__).parents[1] / "agents" / "templates" / "qwen3.jinja"
EXAMPLES = Path(__file__).parents[2] / "examples"
LEFT = ("child processes", "listening ports", "threads", "temporary files", "MiB")
ROOM = ["data.max_response_length=128", "data.max_prompt_length=384"]


@pytest.fixture
def brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few episodes of one row of the present folder; what they leave ends with the test."""
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text(json.dumps(row("221+722=?", "943")) + "\n")
    monkeypatch.setattr(check_env, "EPISODES", 40)
    faulty.END.clear()
    yield
    for kept in faulty.KEPT:
        if not isinstance(kept, bytes):
            (kept.close if hasattr(kept, "close") else kept.wait)()
    faulty.KEPT.clear()
    faulty.END.set()


def verdict(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> dict[str, dict[str, Any]]:
    """The checks by name."""
    assert main(["check-env", "--json", "--rows=1", *arguments]) == code
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[{")]
    return {part["name"]: part for part in json.loads(line)}


def failed(parts: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, part in parts.items() if part["state"] == "FAILED"}


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("function", "checks"),
    [
        pytest.param("right", set(), marks=pytest.mark.deep),
        ("constant", {"rewards", "learning"}),
        pytest.param("pays_silence", {"rewards"}, marks=pytest.mark.deep),
        pytest.param("pays_echo", {"rewards"}, marks=pytest.mark.deep),
        pytest.param("differs", {"same reward"}, marks=pytest.mark.deep),
    ],
)
def test_a_reward_function(function: str, checks: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert failed(verdict(capsys, *SUMS, f"custom_reward_function.name={function}", code=int(bool(checks)))) == checks


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("loop", "check", "named"),
    [
        ("Sound", "", ()),
        pytest.param("RandomWords", "words", ("turn 1",), marks=pytest.mark.deep),
        pytest.param("SharedState", "words", ("turn 1",), marks=pytest.mark.deep),
        pytest.param("OwnWordsAgain", "tokens", ("sums.jsonl",), marks=pytest.mark.deep),
        pytest.param("Raises", "failures", ("OSError",), marks=pytest.mark.deep),
        pytest.param("LeavesAll", "left behind", LEFT, marks=pytest.mark.deep),
    ],
)
def test_an_agent_loop(loop: str, check: str, named: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    parts = verdict(capsys, *SUMS, PAYS, f"{LOOP}={ENV}:{loop}", *ROOM, code=int(bool(check)))
    assert failed(parts) == ({check} if check else set())
    if check:
        says(parts[check]["text"], *named)


@pytest.mark.usefixtures("brief")
@pytest.mark.deep
def test_what_rows_share_is_seen_where_they_are_played_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    with open("sums.jsonl", "a") as file:
        file.write(json.dumps(row("221+723=?", "944")) + "\n")
    parts = verdict(
        capsys, *SUMS, PAYS, f"{LOOP}={ENV}:SharedRow", *ROOM, "--rows=2", "data.train_batch_size=2", code=1
    )
    assert failed(parts) == {"words"}
    says(parts["words"]["text"], "sums.jsonl, line 1", "line 2")


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("computes", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_episodes_that_wait_for_each_other_are_seen(
    computes: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not those that keep the processor busy."""
    monkeypatch.setattr(faulty.OneByOne, "seconds", 0.0)
    monkeypatch.setattr(players, "time", SimpleNamespace(monotonic=lambda: faulty.OneByOne.seconds))
    monkeypatch.setattr(players, "_computed", lambda: faulty.OneByOne.seconds * computes)
    part = verdict(capsys, *SUMS, PAYS, f"{LOOP}={ENV}:OneByOne", *ROOM, code=0)["seconds"]
    assert (part["state"], "asyncio.to_thread" in part["text"]) == (("ok", False) if computes else ("look", True))


@pytest.mark.deep
def test_the_check_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """As it stands there, and quiet; with less room than the environment needs it names what the model has."""
    page = [each.text for each in blocks((EXAMPLES.parent / "docs/environments.md").read_text())]
    (tmp_path / "stock.py").write_text(next(each for each in page if "class Stock:" in each))
    (lines,) = [each for each in page if "check-env --player" in each]
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-ec", lines.replace("grpo-dist", "true")], check=True)
    run = recorded(lines)[-1][2:]
    assert main(["check-env", *run]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert re.search("^tools +ok", shown.out, re.MULTILINE)
    parts = verdict(capsys, *run, "data.max_response_length=40", code=1)
    says(parts["tokens"]["text"], "data.max_response_length=40", "400", "data.max_prompt_length")


def with_template(folder: Path, template: Path) -> str:
    """The built-in model with another chat template."""
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), folder / "model")
    shutil.copy(template, folder / "model" / "chat_template.jinja")
    return f"actor_rollout_ref.model.path={folder}/model"


@pytest.mark.deep
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("tool", "checks"), [("doubles", set()), ("hangs", {"tools", "left behind"})])
def test_a_tool(tool: str, checks: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = by_tools(tmp_path, f"tools: ['{ENV}:{tool}'], tool_timeout_s: 0.05")
    parts = verdict(capsys, *SUMS, PAYS, *given, code=int(bool(checks)))
    assert failed(parts) == checks
    says(parts["tools"]["text"], *(["hangs", "0.05"] if checks else ["0"]))


def by_tools(folder: Path, kwargs: str) -> list[str]:
    """A conversation in which tools are called, with room for it."""
    longer = "actor_rollout_ref.model.override_config={max_position_embeddings: 3072}"
    room = "data.max_prompt_length=1024", "data.max_response_length=2048"
    return [
        *("model=tiny", with_template(folder, QWEN3), longer, *room),
        *(f"{LOOP}=tool_agent", f"{KWARGS}={{{kwargs}, tool_parser: hermes}}"),
    ]


@pytest.mark.deep
@pytest.mark.usefixtures("brief", "bwrap")
def test_a_folder_is_solved_and_its_reward_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a policy can write itself is named, by the cheat's reward."""
    folders.prepare(str(tmp_path), str(EXAMPLES / "task_folders"))
    given = [f"data.train_files={tmp_path}/train.parquet"]
    parts = verdict(capsys, *given, *by_tools(tmp_path, "environment: 'grpo_dist.tasks.folders:Task'"), code=0)
    says(parts["rewards"]["text"], "right    mean 1", "cheat    mean 0", "command, #!/usr/bin/env")
    shutil.rmtree(tmp_path / "model")
    parts = verdict(capsys, *given, *by_tools(tmp_path, f"environment: '{ENV}:ReadsItsReward'"), code=1)
    assert failed(parts) == {"rewards"}
    says(parts["rewards"]["text"], "cheat    mean 1", "train.parquet")


@pytest.mark.deep
@pytest.mark.usefixtures("brief", "bwrap")
def test_programs_with_tests(capsys: pytest.CaptureFixture[str]) -> None:
    solution = "```python\ndef add(a, b):\n    return a + b\n```"
    each = row("Write add(a, b).", "", solution=solution) | {"test_list": ["assert add(1, 2) == 3"]}
    Path("programs.jsonl").write_text(json.dumps(each) + "\n")
    function = "custom_reward_function.path=grpo_dist.tasks.code"
    parts = verdict(
        capsys, "data.train_files=programs.jsonl", function, "data.max_response_length=512", *LONGER, code=0
    )
    says(parts["rewards"]["text"], "right    mean 1", "cheat    mean 0, from 0 to 0")


BID = """
import re


def bid(messages):
    return f"#### {int(re.findall('[0-9]+', messages[-1]['content'])[-1]) + 1}"
"""
AUCTION = (
    f"environment: '{EXAMPLES}/environment/auction.py:Auction', tool_parser: '{EXAMPLES}/environment/auction.py:calls'"
)


@pytest.mark.deep
def test_a_policy_of_the_users_plays_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It bids one more than each price that it reads; without it nobody knows what is right."""
    (tmp_path / "policy.py").write_text(BID)
    extra = {"price": 120, "raises": [3, 40, 5]}
    asked = {"data_source": "auction", "prompt": [{"role": "user", "content": "auction"}], "extra_info": extra}
    (tmp_path / "rows.jsonl").write_text(json.dumps(asked))
    model = with_template(tmp_path, EXAMPLES / "environment" / "chat_template.jinja")
    given = [model, "model=tiny", f"{LOOP}=tool_agent", f"{KWARGS}={{{AUCTION}}}", *ROOM]
    given += [f"data.train_files={tmp_path}/rows.jsonl", "actor_rollout_ref.rollout.agent.max_assistant_turns=3"]
    parts = verdict(capsys, *given, f"--player={tmp_path}/policy.py:bid", code=0)
    says(parts["rewards"]["text"], "right    mean 1", "silence  mean 0")
    says(parts["tools"]["text"], "agent_kwargs.tool_parser", "chat_template.jinja")
    says(verdict(capsys, *given, code=0)["rewards"]["text"], "--player")
    assert main(["check-env", *given, "--answer=7"]) == 2
    says(capsys.readouterr().err, "--answer", f"{LOOP}=tool_agent", "--player")


@pytest.mark.deep
def test_an_agent_at_the_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    play = f"{KWARGS}={{play: '{EXAMPLES}/openai_agent/agent.py:play'}}"
    parts = verdict(capsys, f"{LOOP}=external", play, code=0)
    assert failed(parts) == set()
    says(parts["rewards"]["text"], "right    mean 1", "#### 943")


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        [],
        ["data=squares"],
        [f"custom_reward_function.path={EXAMPLES}/custom_reward/reward.py"],
        [f"{LOOP}={EXAMPLES}/calculator/calculator.py:Calculator", f"{KWARGS}={{max_calls: 8}}"],
    ],
    ids=["sums", "pictures", "reward", "calculator"],
)
def test_sound_environments_pass(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parts = verdict(capsys, *given, code=0)
    assert failed(parts) == set()
    says(parts["rewards"]["text"], "right    mean 1")


@pytest.mark.long
@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the package: pip install reasoning-gym")
def test_tasks_of_reasoning_gym_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ["--task", "chain_sum", "--train_size=4", "--test_size=1"]
    assert main(["data", "reasoning_gym", f"--local_save_dir={tmp_path}", *tasks]) == 0
    parts = verdict(capsys, f"data.train_files={tmp_path}/train.parquet", "data.max_prompt_length=256", code=0)
    assert failed(parts) == set()


@pytest.mark.deep
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("code", "named"), [("1 / 0", "ZeroDivisionError"), ("7", "7")])
def test_a_policy_that_says_no_text_ends_with_2(code: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("policy.py").write_text(f"def says(messages):\n    return {code}\n")
    assert main(["check-env", *SUMS, PAYS, "--player=policy.py:says"]) == 2
    says(capsys.readouterr().err, "--player", "policy.py:says", named)


@pytest.mark.deep
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("loop", "checks"), [("Waits", {"tokens"}), ("Blocks", {"failures", "rewards"})])
def test_a_loop_that_hangs(loop: str, checks: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One that waits is ended and scored as it is, as in a run; one that blocks ends the check."""
    limit = "actor_rollout_ref.rollout.agent.timeout_s"
    parts = verdict(capsys, *SUMS, PAYS, f"{LOOP}={ENV}:{loop}", f"{limit}=0.2", *ROOM, code=1)
    assert failed(parts) == checks
    says(parts["tokens" if loop == "Waits" else "failures"]["text"], limit)
