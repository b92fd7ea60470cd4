"""Rows in other schemas than verl's: which columns are taken, what is said of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.data import Prompt, load_prompts
from grpo_dist.data.files import source_name
from grpo_dist.data.prompts import UNREAD, filled, unread, unread_notes
from grpo_dist.errors import DataError
from tests.messages import refuses, says

KEY = "data.train_files"
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}


def load(folder: Path, *rows: dict[str, Any], **columns: Any) -> list[Prompt]:
    """The prompts of a file with these rows, for a reward function of one's own."""
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"needs_source": False} | columns
    return load_prompts([str(folder / "sums.jsonl")], key=KEY, max_samples=-1, shuffle_seed=None, **named)


@pytest.mark.parametrize(
    ("row", "taken"),
    [
        ({"question": "1+1?", "answer": "2"}, {"data.prompt_key": "question", "data.answer_key": "answer"}),
        ({"problem": "1+1?", "solution": "2"}, {"data.prompt_key": "problem", "data.answer_key": "solution"}),
        ({"prompt": "1+1?", "ground_truth": "2"}, {"data.answer_key": "ground_truth"}),
        ({"prompt": [USER], "solution": "2"}, {"data.answer_key": "solution"}),
        ({"messages": [USER, ANSWER]}, {"data.prompt_key": "messages", "data.answer_key": "messages[-1]"}),
        (
            {"messages": [USER, {**ANSWER, "content": "two"}], "answer": "2"},
            {"data.prompt_key": "messages", "data.answer_key": "answer"},
        ),
        ({"messages": [USER], "reward_model": {"ground_truth": "2"}}, {"data.prompt_key": "messages"}),
        ({"question": None, "problem": "1+1?", "solution": None, "answer": "2"}, None),
    ],
)
def test_what_the_usual_columns_are_called_elsewhere(
    tmp_path: Path, row: dict[str, Any], taken: dict[str, str] | None
) -> None:
    (prompt,) = load(tmp_path, row)
    assert (prompt.messages, prompt.ground_truth, prompt.data_source) == ([USER], "2", "sums")
    assert prompt.is_text == isinstance(row.get("prompt", row.get("question") or row.get("problem")), str)
    if taken is not None:
        assert prompt.taken == {"data.data_source": "sums", **taken}


def test_verls_schema_is_taken_as_it_is_whatever_other_columns_there_are(tmp_path: Path) -> None:
    row = {"data_source": "gsm8k", "prompt": [USER], "reward_model": {"ground_truth": "2"}}
    others = {"question": "q", "messages": [USER, ANSWER], "answer": "a", "solution": "s"}
    (prompt,) = load(tmp_path, {**others, **row}, needs_source=True)
    assert (prompt.messages, prompt.ground_truth, prompt.data_source) == ([USER], "2", "gsm8k")
    assert prompt.taken == {}


def test_keys_stand_above_what_is_found(tmp_path: Path) -> None:
    row = {"question": "x", "problem": "1+1?", "answer": "two", "solution": 2, "reward_model": {"ground_truth": "z"}}
    (prompt,) = load(tmp_path, row, prompt_key="problem", answer_key="solution", data_source="mine")
    assert (prompt.messages, prompt.ground_truth, prompt.data_source, prompt.taken) == ([USER], 2, "mine", {})
    (prompt,) = load(tmp_path, {**row, "data_source": "theirs"}, prompt_key="problem", data_source="mine")
    assert (prompt.data_source, prompt.ground_truth) == ("theirs", "z"), "a constant is for rows that have none"


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        ({"question": "a", "problem": "b", "answer": "2"}, {}, ["data.prompt_key=question", "data.prompt_key=problem"]),
        ({"prompt": "a", "answer": "2", "solution": "3"}, {}, ["data.answer_key=answer", "data.answer_key=solution"]),
        ({"prompt": "a"}, {}, ["'answer'", "'reward_model'", "data.answer_key=COLUMN", "ground_truth=None"]),
        ({"prompt": "a", "answer": "2"}, {"answer_key": "label"}, ["'label'", "data.answer_key=label"]),
        ({"prompt": "a", "answer": "2"}, {"prompt_key": "text"}, ["'text'", "data.prompt_key=text"]),
        ({"text": "a", "answer": "2"}, {}, ["'prompt'", "data.prompt_key=prompt", "text, answer"]),
        ({"prompt": "a", "answer": float("nan")}, {}, ["answer", "nan"]),
        ({"messages": [ANSWER]}, {}, ["messages", "assistant"]),
        (
            {"prompt": "a", "answer": "2"},
            {"needs_source": True},
            ["'data_source'", "data.data_source=", "custom_reward_function.path"],
        ),
        ({"prompt": "a", "answer": "2"}, {"needed": ["level"]}, ["'level'", "prompt, answer", "default"]),
    ],
)
def test_what_is_missing_or_ambiguous_is_refused_with_the_key(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, Any], words: list[str]
) -> None:
    with refuses(DataError, KEY, f"{tmp_path}/sums.jsonl, line 2", *words):
        load(tmp_path, {"prompt": "b", "answer": "1", "label": 1, "text": "b", "level": 1, "data_source": "d"}, row,
             **columns)  # fmt: skip


def test_without_a_need_for_it_the_ground_truth_may_be_missing_or_unclear(tmp_path: Path) -> None:
    rows = {"prompt": "1+1?"}, {"prompt": "1+1?", "answer": "2", "solution": "3"}, {"prompt": "1+1?", "answer": "2"}
    assert [p.ground_truth for p in load(tmp_path, *rows, needs_ground_truth=False)] == [None, None, "2"]
    named = load(tmp_path, *rows, needs_ground_truth=False, answer_key="solution")
    assert [p.ground_truth for p in named] == [None, "3", None]


def test_a_template_around_columns(tmp_path: Path) -> None:
    template = r"Level {level}: {question}\nWrite \boxed{}, not {{question}}."
    (prompt,) = load(tmp_path, {"question": "1+1?", "level": 3, "answer": "2"}, prompt_template=template)
    written = "Level 3: 1+1?\nWrite \\boxed{}, not {question}."
    assert (prompt.messages, prompt.is_text) == ([{"role": "user", "content": written}], True)
    assert prompt.taken == {"data.answer_key": "answer", "data.data_source": "sums"}
    assert filled('{a}{b} {"json": {}}', {"a": "{b}", "b": 1}, "") == '{b}1 {"json": {}}', "values are not templates"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{query} #", ["sums.jsonl, line 1", "'query'", "data.prompt_template", "question, answer, parts"]),
        ("Solve it.", ["data.prompt_template=Solve it.", "{question}"]),
        ("{parts}", ["sums.jsonl, line 1", "parts", "list"]),
    ],
)
def test_a_template_that_does_not_fit(tmp_path: Path, template: str, words: list[str]) -> None:
    with refuses(DataError, *words):
        load(tmp_path, {"question": "1+1?", "answer": "2", "parts": [1]}, prompt_template=template)


def test_the_other_columns_are_kept_for_the_reward_function_as_far_as_it_takes_them(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "2", "level": 3, "hint": None, "extra_info": {"unit": "m"}}
    assert load(tmp_path, row)[0].columns == {}
    assert load(tmp_path, row, kept=["level", "colour"])[0].columns == {"level": 3}
    kept = load(tmp_path, row, kept=None, needed=["hint", "unit"])[0].columns
    assert kept == {"question": "1+1?", "answer": "2", "level": 3, "hint": None}


MEDIA_ROWS = [("images", [{"path": "1.png"}]), ("image", "1.png"), ("videos", ["a.mp4"]), ("audios", ["a.wav"])]


@pytest.mark.parametrize(("name", "value"), MEDIA_ROWS)
def test_what_a_policy_cannot_see_or_hear_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    row = {"prompt": [USER], "answer": "2", name: value}
    with refuses(DataError, f"{tmp_path}/sums.jsonl, line 1", name, "text"):
        load(tmp_path, row)
    with refuses(DataError, name):
        load(tmp_path, row, kept=None)
    assert load(tmp_path, row, kept=[name])[0].columns == {name: value}, "the reward function reads it by name"
    (prompt,) = load(tmp_path, row | {name: type(value)()})
    assert prompt.unread == ()


def test_what_would_change_the_task_and_is_not_read_is_noted() -> None:
    info = {"tools_kwargs": {"calc": {}}, "need_tools_kwargs": True, "tool_selection": ["calc"], "index": 3}
    verls = {"agent_name": "tool_agent", "ability": "math", "extra_info": info | {"interaction_kwargs": {"name": "x"}}}
    trls = {"tools": [{"type": "function"}], "chat_template_kwargs": {"think": True}, "enable_thinking": False}
    found = unread(verls) + unread(trls)
    assert {name.partition("=")[0] for name in found} == UNREAD.keys() - {"enable_thinking"}, "false says nothing here"
    assert unread({"agent_name": None, "tools": [], "extra_info": None}) == ()

    rows = [SimpleNamespace(unread=unread(verls)), SimpleNamespace(unread=()), SimpleNamespace(unread=unread(trls))]
    notes = list(unread_notes(KEY, rows, "single_turn_agent"))
    assert len(notes) == len(found)
    says(notes[0], KEY, "agent_name=tool_agent", "1 of 3", "rollout.agent.default_agent_loop")
    assert not any("agent_name" in note for note in unread_notes(KEY, rows, "tool_agent")), "all rows run it"
    own = list(unread_notes(KEY, rows, "my/loop.py:Loop"))
    assert any("agent_name" in note for note in own)
    assert not any("extra_info" in note for note in own), "which reads it"


def test_content_in_parts_of_text_is_text(tmp_path: Path) -> None:
    """OpenAI's form."""
    parts = [{"type": "text", "text": "Add."}, {"type": "text", "text": "1+1?"}]
    (prompt,) = load(tmp_path, {"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert (prompt.messages, prompt.ground_truth) == ([{"role": "user", "content": "Add.\n1+1?"}], "2")
    with refuses(DataError, "line 1", "messages", "message 1", "text", "list"):
        load(tmp_path, {"messages": [{"role": "user", "content": [*parts, {"type": "image_url"}]}, ANSWER]})


def test_parquet_rows_too(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"messages": [USER, ANSWER], "level": 1}]), tmp_path / "a.parquet")
    (prompt,) = load_prompts(
        [str(tmp_path / "a.parquet")], key=KEY, max_samples=-1, shuffle_seed=None, needs_source=False
    )
    assert (prompt.messages, prompt.ground_truth, prompt.data_source) == ([USER], "2", "a")


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("data/sums.jsonl, line 3", "sums"),
        ("data, new/train-00000-of-00002.parquet, row 1", "train"),
        ("data/sums/0000.parquet, row 1", "sums"),
        ("hf:openai/gsm8k/main:test, row 9", "openai/gsm8k/main"),
    ],
)
def test_the_name_of_a_source(location: str, name: str) -> None:
    assert source_name(location) == name
