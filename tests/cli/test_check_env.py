"""`grpo-dist check-env`: an environment is played without weights, and each planted fault is named by its check."""

import json
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.checks.own_answers import own_answer
from grpo_dist.cli import check_env, players
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import ConfigError
from grpo_dist.tasks import folders
from tests.cli import faulty_environments as faulty
from tests.cli.conftest import Call
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
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    Path("reward.py").write_text(FUNCTION)
    return ["data.train_files=rows.jsonl", "custom_reward_function.path=reward.py", "data.train_batch_size=2"]


def test_own_answers_are_scored_with_what_the_function_says(own: list[str], call: Call) -> None:
    scored, _, checked = call("check-env", *own, code=1).out.partition("\nrewards ")
    _, first, second, third = scored.split("rows.jsonl")
    says(first, "line 1", "'Name a fruit.'", "'apple'", "ground truth", "score      1", "looking")
    says(second, "'3 + 4 = 7'", "solution", "score      1", "length=9", "pred=x")
    says(third, "FAILED", "KeyError", 'raise KeyError("puce")', "red\n\n3 responses", "2 scored", "1 failed", "1 to 1")
    says(checked, "FAILED", "KeyError", "rows.jsonl, line 3")


@pytest.mark.deep
def test_answers_that_are_given(own: list[str], call: Call) -> None:
    told = call("check-env", "--row", "1", "--answer", "An apple", *own, "--answer=a pear").out
    says(told, "'An apple'", "--answer", "score      1")
    says(told, "'a pear'", "score      0")
    assert "colour" not in told
    assert "colour" not in call("check-env", *own, "--rows", "1").out


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
def test_mistakes_end_with_2(arguments: list[str], parts: list[str], own: list[str], call: Call) -> None:
    says(call("check-env", *own, *arguments, code=2).err, *parts)


def test_the_built_in_task(call: Call) -> None:
    says(call("check-env", "--rows=1", "--answer=943").out, "data_source=arithmetic", "score      0", "--answer")
    says(call("check-env", "--row=1", "--answer=#### 943").out, "acc=1", "score      1")


def test_where_a_row_has_its_own_answer() -> None:
    def prompt(truth: Any, **extra_info: Any) -> Prompt:
        return Prompt(0, "mine", [{"role": "user", "content": "?"}], truth, extra_info, "rows.jsonl, line 1")

    assert own_answer(prompt("7", answer="so 7"))[0] == "so 7"
    assert own_answer(prompt("7", answer=["no text"]))[0] == "7"
    assert own_answer(prompt({"target": 7}))[0] == '{"target": 7}'
    with refuses(ConfigError, "rows.jsonl, line 1", "--answer TEXT"):
        own_answer(prompt(None))


def test_the_old_name_is_answered_by_the_new_one(call: Call) -> None:
    said = call("check-reward", "--rows=1", "data.train_batch_size=2", code=2)
    says(said.err, "grpo-dist check-env --rows=1 data.train_batch_size=2")


# --- what players find ------------------------------------------------------------------------------------------------
LOOP, ENV = "actor_rollout_ref.rollout.agent.default_agent_loop", "tests.cli.faulty_environments"
KWARGS = "actor_rollout_ref.rollout.agent.agent_kwargs"
LONGER = ["model=tiny", "actor_rollout_ref.model.override_config={max_position_embeddings: 1024}"]
SUMS = ["data.train_files=sums.jsonl", f"custom_reward_function.path={faulty.__file__}"]
PAYS = "custom_reward_function.name=right"
QWEN3 = Path(__file__).parents[1] / "agents" / "templates" / "qwen3.jinja"
EXAMPLES = Path(__file__).parents[2] / "examples"
ROOM = ["data.max_response_length=128", "data.max_prompt_length=384"]


@pytest.fixture
def brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few episodes of one row; what they leave ends with the test."""
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


@pytest.fixture
def verdict(call: Call) -> Call:
    """Checks, of which those that are named fail, and no others; returns the state and text of each by its name."""

    def verdict(*arguments: str, failed: Collection[str] = ()) -> dict[str, str]:
        told = call("check-env", "--json", "--rows=1", *arguments, code=int(bool(failed))).out
        (line,) = [line for line in told.splitlines() if line.startswith("[{")]
        parts = json.loads(line)
        assert {part["name"] for part in parts if part["state"] == "FAILED"} == {*failed}
        return {part["name"]: f"{part['state']} {part['text']}" for part in parts}

    return verdict


FUNCTIONS = {
    "right": (),
    "constant": ("rewards", "learning"),
    "pays_silence": ("rewards",),
    "pays_echo": ("rewards",),
    "differs": ("same reward",),
}


@pytest.mark.deep
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_reward_function(function: str, verdict: Call) -> None:
    verdict(*SUMS, f"custom_reward_function.name={function}", failed=FUNCTIONS[function])


LOOPS: dict[str, tuple[str, ...]] = {
    "Sound": (),
    "RandomWords": ("words", "turn 1"),
    "OwnWordsAgain": ("tokens", "sums.jsonl"),
    "Raises": ("failures", "OSError"),
    "LeavesAll": ("left behind", "child processes", "listening ports", "threads", "temporary files", "MiB"),
}


@pytest.mark.deep
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("loop", LOOPS)
def test_an_agent_loop(loop: str, verdict: Call) -> None:
    found = verdict(*SUMS, PAYS, f"{LOOP}={ENV}:{loop}", *ROOM, failed=LOOPS[loop][:1])
    for check in LOOPS[loop][:1]:
        says(found[check], *LOOPS[loop][1:])


@pytest.mark.usefixtures("brief")
@pytest.mark.deep
def test_what_rows_share_is_seen_where_they_are_played_side_by_side(verdict: Call) -> None:
    with open("sums.jsonl", "a") as file:
        file.write(json.dumps(row("221+723=?", "944")) + "\n")
    parts = verdict(
        *SUMS, PAYS, f"{LOOP}={ENV}:SharedRow", *ROOM, "--rows=2", "data.train_batch_size=2", failed=["words"]
    )
    says(parts["words"], "sums.jsonl, line 1", "line 2")


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("computes", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_episodes_that_wait_for_each_other_are_seen(
    computes: bool, verdict: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty.OneByOne, "seconds", 0.0)
    monkeypatch.setattr(players, "time", SimpleNamespace(monotonic=lambda: faulty.OneByOne.seconds))
    monkeypatch.setattr(players, "_computed", lambda: faulty.OneByOne.seconds * computes)
    told = verdict(*SUMS, PAYS, f"{LOOP}={ENV}:OneByOne", *ROOM)["seconds"]
    assert (told.startswith("look "), "asyncio.to_thread" in told) == (not computes, not computes)


@pytest.mark.deep
def test_the_check_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, verdict: Call) -> None:
    page = [each.text for each in blocks((EXAMPLES.parent / "docs/environments.md").read_text())]
    (tmp_path / "stock.py").write_text(next(each for each in page if "class Stock:" in each))
    (lines,) = [each for each in page if "check-env --player" in each]
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-ec", lines.replace("grpo-dist", "true")], check=True)
    run = recorded(lines)[-1][2:]
    shown = call("check-env", *run)
    assert shown.err == ""
    assert re.search("^tools +ok", shown.out, re.MULTILINE)
    parts = verdict(*run, "data.max_response_length=40", failed=["tokens", "rewards", "learning"])
    says(parts["tokens"], "data.max_response_length=40", "400", "data.max_prompt_length")


def with_template(folder: Path, template: Path) -> str:
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), folder / "model")
    shutil.copy(template, folder / "model" / "chat_template.jinja")
    return f"actor_rollout_ref.model.path={folder}/model"


@pytest.mark.deep
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("tool", "checks"), [("doubles", set()), ("hangs", {"tools", "left behind"})])
def test_a_tool(tool: str, checks: set[str], tmp_path: Path, verdict: Call) -> None:
    given = by_tools(tmp_path, f"tools: ['{ENV}:{tool}'], tool_timeout_s: {0.05 if checks else 30}")
    parts = verdict(*SUMS, PAYS, *given, failed=checks)
    says(parts["tools"], *(["hangs", "0.05"] if checks else ["0"]))


def by_tools(folder: Path, kwargs: str) -> list[str]:
    longer = "actor_rollout_ref.model.override_config={max_position_embeddings: 3072}"
    room = ["data.max_prompt_length=1024", "data.max_response_length=2048"]
    tools = [f"{LOOP}=tool_agent", f"{KWARGS}={{{kwargs}, tool_parser: hermes}}"]
    return ["model=tiny", with_template(folder, QWEN3), longer, *room, *tools]


@pytest.mark.deep
@pytest.mark.usefixtures("brief", "bwrap")
def test_a_folder_is_solved_and_its_reward_is_not_written(tmp_path: Path, verdict: Call) -> None:
    folders.prepare(str(tmp_path), str(EXAMPLES / "task_folders"))
    given = f"data.train_files={tmp_path}/train.parquet"
    parts = verdict(given, *by_tools(tmp_path, "environment: 'grpo_dist.tasks.folders:Task'"))
    says(parts["rewards"], "right    mean 1", "cheat    mean 0", "command, #!/usr/bin/env")
    shutil.rmtree(tmp_path / "model")
    parts = verdict(given, *by_tools(tmp_path, f"environment: '{ENV}:ReadsItsReward'"), failed=["rewards"])
    says(parts["rewards"], "cheat    mean 1", "train.parquet")


@pytest.mark.deep
@pytest.mark.usefixtures("brief", "bwrap")
def test_programs_with_tests(verdict: Call) -> None:
    solution = "```python\ndef add(a, b):\n    return a + b\n```"
    each = row("Write add(a, b).", "", solution=solution) | {"test_list": ["assert add(1, 2) == 3"]}
    Path("programs.jsonl").write_text(json.dumps(each) + "\n")
    function = "custom_reward_function.path=grpo_dist.tasks.code"
    parts = verdict("data.train_files=programs.jsonl", function, "data.max_response_length=512", *LONGER)
    says(parts["rewards"], "right    mean 1", "cheat    mean 0, from 0 to 0")


BID = """
import re


def bid(messages):
    return f"#### {int(re.findall('[0-9]+', messages[-1]['content'])[-1]) + 1}"
"""


@pytest.mark.deep
def test_a_policy_of_the_users_plays_right(tmp_path: Path, call: Call, verdict: Call) -> None:
    (tmp_path / "policy.py").write_text(BID)
    asked = row("auction", None, price=120, raises=[3, 40, 5]) | {"data_source": "auction"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(asked))
    auction = EXAMPLES / "environment" / "auction.py"
    kwargs = f"environment: '{auction}:Auction', tool_parser: '{auction}:calls'"
    model = with_template(tmp_path, auction.with_name("chat_template.jinja"))
    given = [model, "model=tiny", f"{LOOP}=tool_agent", f"{KWARGS}={{{kwargs}}}", *ROOM]
    given += [f"data.train_files={tmp_path}/rows.jsonl", "actor_rollout_ref.rollout.agent.max_assistant_turns=3"]
    parts = verdict(*given, f"--player={tmp_path}/policy.py:bid")
    says(parts["rewards"], "right    mean 1", "silence  mean 0")
    says(parts["tools"], "agent_kwargs.tool_parser", "chat_template.jinja")
    says(verdict(*given)["rewards"], "--player")
    says(call("check-env", *given, "--answer=7", code=2).err, "--answer", f"{LOOP}=tool_agent", "--player")


@pytest.mark.deep
def test_an_agent_at_the_endpoint(verdict: Call) -> None:
    play = f"{KWARGS}={{play: '{EXAMPLES}/openai_agent/agent.py:play'}}"
    says(verdict(f"{LOOP}=external", play)["rewards"], "right    mean 1", "#### 943")


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
def test_sound_environments_pass(given: list[str], verdict: Call) -> None:
    says(verdict(*given)["rewards"], "right    mean 1")


@pytest.mark.long
@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the package: pip install reasoning-gym")
def test_tasks_of_reasoning_gym_pass(tmp_path: Path, call: Call, verdict: Call) -> None:
    tasks = ["--task", "chain_sum", "--train_size=4", "--test_size=1"]
    call("data", "reasoning_gym", f"--local_save_dir={tmp_path}", *tasks)
    verdict(f"data.train_files={tmp_path}/train.parquet", "data.max_prompt_length=256")


@pytest.mark.deep
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("code", "named"), [("1 / 0", "ZeroDivisionError"), ("7", "7")])
def test_a_policy_that_says_no_text_ends_with_2(code: str, named: str, call: Call) -> None:
    Path("policy.py").write_text(f"def says(messages):\n    return {code}\n")
    says(call("check-env", *SUMS, PAYS, "--player=policy.py:says", code=2).err, "--player", "policy.py:says", named)


@pytest.mark.deep
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("loop", "checks"), [("Waits", {"tokens"}), ("Blocks", {"failures", "rewards"})])
def test_a_loop_that_hangs(loop: str, checks: set[str], verdict: Call) -> None:
    """One that waits is ended and scored as it is, as in a run; one that blocks ends the check."""
    limit = "actor_rollout_ref.rollout.agent.timeout_s"
    parts = verdict(*SUMS, PAYS, f"{LOOP}={ENV}:{loop}", f"{limit}=0.2", *ROOM, failed=checks)
    says(parts["tokens" if loop == "Waits" else "failures"], limit)
