"""Rows as prompts: verl's schema and others, which columns are taken, and how a broken row is named."""

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
ANSWER, SURE = ({"role": "assistant", "content": text} for text in ("2", "Sure."))


def row(question: str = "1+1?", **changes: object) -> dict[str, Any]:
    return {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7, "split": "train"},
    } | changes


def read(path: Path, **options: Any) -> list[Prompt]:
    return load_prompts([str(path)], **({"key": KEY, "max_samples": -1, "shuffle_seed": None} | options))


def load(folder: Path, *rows: object, **options: Any) -> list[Prompt]:
    """The prompts of a file with these rows, for a reward function of one's own."""
    lines = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in rows)
    (folder / "sums.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return read(folder / "sums.jsonl", **({"needs_source": False} | options))


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


ANSWERED = {"role": "tool", "content": "ok", "name": "x"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "?", "cache": 1}]}
TO_A_PLACE = calls("move", to={"x": 0, "y": [1, None]})
ROWS = {
    "texts": [row(), row("Wie groß? \u2028 両")],
    "calls": [
        row(prompt=[USER, call, ANSWERED, USER])
        for call in (TO_A_PLACE, calls("weather", city="Bern", at={"day": {"of": "month"}}), calls("stop"))
    ],
    "parts": [row(prompt=[PARTS]), row(prompt=[PARTS | {"name": "Ann"}])],
}


@pytest.mark.parametrize("kind", ROWS)
def test_every_kind_of_file_gives_the_same_prompts(tmp_path: Path, kind: str) -> None:
    """Arrow gives every object of a column the fields of all: the arguments of the other tools, at any depth."""
    import datasets

    rows = ROWS[kind]
    lines = load(tmp_path, *rows, needs_source=True)
    assert [each.index for each in lines] == list(range(len(rows)))
    told = {(each.data_source, each.ground_truth, *each.extra_info.items()) for each in lines}
    assert told == {("gsm8k", "2", ("index", 7), ("split", "train"))}
    assert lines[1].location == f"{tmp_path}/sums.jsonl, line 2"
    if kind == "texts":
        assert [each.messages for each in lines] == [each["prompt"] for each in rows]
    if kind == "parts":
        assert lines[0].messages == [{"role": "user", "content": "and\n?"}], "OpenAI's form"
    if kind == "calls":
        assert lines[0].messages[1] == {**TO_A_PLACE, "content": ""}, "null among the entries of a list stays"
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name in ("a.json", "a.parquet", "saved"):
        found = read(tmp_path / name)
        for each, line in zip(found, lines, strict=True):
            assert (each.messages, each.extra_info) == (line.messages, line.extra_info)
        assert found[1].location == f"{tmp_path}/{name}, row 2"


def test_nulls_of_parquet(tmp_path: Path) -> None:
    """Nobody knows what they say: a list of what is right may have one, and a function of one's own reads the rest."""
    truth, info = {"x": None, "y": [None, 1]}, {"tools_kwargs": {"calc": {"truth": None}}}
    rows = [row(reward_model={"ground_truth": truth}, extra_info=info)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (prompt,) = read(tmp_path / "a.parquet")
    assert (prompt.ground_truth, prompt.extra_info) == (truth, info)
    rows = [row(f"q{i}", reward_model={"style": "rule", "ground_truth": None if i == 4 else "2"}) for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with refuses(DataError, "a.parquet, row 5", "reward_model"):
        read(tmp_path / "a.parquet", max_samples=2)


def test_max_samples_first_or_seeded_subset(tmp_path: Path) -> None:
    def chosen(**options: Any) -> list[int]:
        found = load(tmp_path, *[row(f"q{i}") for i in range(20)], **options)
        assert [each.messages[0]["content"] for each in found] == [f"q{each.index}" for each in found]
        return [each.index for each in found]

    assert chosen(max_samples=3) == [0, 1, 2]
    subset = chosen(max_samples=5, shuffle_seed=1)
    assert subset == chosen(max_samples=5, shuffle_seed=1) == sorted(set(subset))
    assert subset != chosen(max_samples=5, shuffle_seed=2)
    assert len(chosen(max_samples=99)) == 20


def test_what_columns_are_called_elsewhere(tmp_path: Path) -> None:
    for row, taken in (
        ({"question": "1+1?", "answer": "2"}, {"data.prompt_key": "question", "data.answer_key": "answer"}),
        ({"problem": "1+1?", "solution": "2"}, {"data.prompt_key": "problem", "data.answer_key": "solution"}),
        ({"prompt": "1+1?", "ground_truth": "2", "extra_info": None}, {"data.answer_key": "ground_truth"}),
        ({"prompt": [USER], "solution": "2"}, {"data.answer_key": "solution"}),
        ({"messages": [USER, ANSWER]}, {"data.prompt_key": "messages", "data.answer_key": "messages[-1]"}),
        ({"messages": [USER, SURE], "answer": "2"}, {"data.prompt_key": "messages", "data.answer_key": "answer"}),
        ({"messages": [USER], "reward_model": {"ground_truth": "2"}}, {"data.prompt_key": "messages"}),
        ({"question": None, "problem": "1+1?", "solution": None, "answer": "2"}, None),
    ):
        (prompt,) = load(tmp_path, row)
        assert (prompt.messages, prompt.ground_truth, prompt.data_source) == ([USER], "2", "sums")
        assert prompt.extra_info == {}
        assert prompt.is_text == isinstance(row.get("prompt", row.get("question") or row.get("problem")), str)
        if taken is not None:
            assert prompt.taken == {"data.data_source": "sums", **taken}


def test_keys_stand_above_what_is_found_and_verls_schema_above_other_columns(tmp_path: Path) -> None:
    others = {"question": "q", "problem": "1+1?", "messages": [USER, ANSWER], "answer": "two", "solution": 2}
    (prompt,) = load(tmp_path, others | row(), needs_source=True)
    assert (prompt.messages, prompt.ground_truth, prompt.data_source, prompt.taken) == ([USER], "2", "gsm8k", {})
    named = {"prompt_key": "problem", "answer_key": "solution", "data_source": "mine"}
    (prompt,) = load(tmp_path, others, **named)
    assert (prompt.messages, prompt.ground_truth, prompt.data_source, prompt.taken) == ([USER], 2, "mine", {})
    (prompt,) = load(tmp_path, row(task="qa"), data_source="mine", reward_fn_key="task")
    assert prompt.data_source == "qa", "a constant is for rows that have none"


NO_SOURCE = ["'data_source'", "data.reward_fn_key=data_source", "data.data_source=", "custom_reward_function.path"]


def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    for bad, columns, words in (
        (row(data_source=3), {}, ["data_source", "string", "int 3"]),
        (row(prompt=None), {}, ["'prompt'", "data.prompt_key=prompt", "data_source, prompt"]),
        (row(prompt=[]), {}, ["prompt", "list"]),
        (row(prompt=5), {}, ["prompt", "int 5"]),
        (row(prompt=["hello"]), {}, ["role", "str 'hello'"]),
        (row(prompt=[{"content": "x"}]), {}, ["role"]),
        (row(prompt=[{"role": "user"}]), {}, ["content", "message 1", "text", "NoneType"]),
        (row(prompt=[{"role": "user", "content": [{"type": "image"}]}]), {}, ["text", "list"]),
        (row(prompt="  "), {}, ["prompt", "empty"]),
        (row(prompt=json.dumps([USER])), {}, ["prompt", "JSON", "list"]),
        (row(prompt=[USER, calls("add", a=1)]), {}, ["prompt", "tool"]),
        (row(reward_model="2"), {}, ["reward_model", "str '2'"]),
        (row(reward_model={"style": "rule"}), {}, ["reward_model", "ground_truth"]),
        (row(reward_model="yes"), {"needs_ground_truth": False}, ["reward_model"]),
        (row(extra_info=[1]), {}, ["extra_info", "object", "list"]),
        ({"question": "a", "problem": "b", "answer": "2"}, {}, ["data.prompt_key=question", "data.prompt_key=problem"]),
        ({"prompt": "a", "answer": "2", "solution": "3"}, {}, ["data.answer_key=answer", "data.answer_key=solution"]),
        ({"prompt": "a"}, {}, ["'answer'", "'reward_model'", "data.answer_key=COLUMN", "ground_truth=None"]),
        ({"prompt": "a", "answer": "2"}, {"answer_key": "label"}, ["'label'", "data.answer_key=label"]),
        ({"prompt": "a", "answer": "2"}, {"prompt_key": "text"}, ["'text'", "data.prompt_key=text"]),
        ({"text": "a", "answer": "2"}, {}, ["'prompt'", "data.prompt_key=prompt", "text, answer"]),
        ({"messages": [ANSWER]}, {}, ["messages", "assistant"]),
        ({"prompt": "a", "answer": "2"}, {"needs_source": True}, NO_SOURCE),
        ({"prompt": "a", "answer": "2"}, {"needed": ["level"]}, ["'level'", "prompt, answer", "default"]),
    ):
        good = {"prompt": "b", "answer": "1", "label": 1, "text": "b", "level": 1, "data_source": "d"}
        with refuses(DataError, KEY, f"{tmp_path}/sums.jsonl, line 3", *words) as error:
            load(tmp_path, good, "", bad, good, **columns)
        assert "\n" not in str(error.value)


def test_without_a_need_for_it_the_ground_truth_may_be_missing_or_unclear(tmp_path: Path) -> None:
    rows = (
        {"prompt": "1+1?", "completion": "short"},
        {"prompt": "1+1?", "answer": "2", "solution": "3", "reward_model": {"style": "model"}},
        {"prompt": "1+1?", "answer": "2", "data_source": "hh"},
    )
    found = load(tmp_path, *rows, needs_ground_truth=False, data_source="data")
    assert [(each.ground_truth, each.data_source) for each in found] == [(None, "data"), (None, "data"), ("2", "hh")]
    assert [each.messages for each in found] == [[USER]] * 3
    named = load(tmp_path, *rows, needs_ground_truth=False, answer_key="solution")
    assert [each.ground_truth for each in named] == [None, "3", None]


def test_a_template_around_columns(tmp_path: Path) -> None:
    template = r"Level {level}: {question}\nWrite \boxed{}, not {{question}}."
    (prompt,) = load(tmp_path, {"question": "1+1?", "level": 3, "answer": "2"}, prompt_template=template)
    written = "Level 3: 1+1?\nWrite \\boxed{}, not {question}."
    assert (prompt.messages, prompt.is_text) == ([{"role": "user", "content": written}], True)
    assert prompt.taken == {"data.answer_key": "answer", "data.data_source": "sums"}
    assert filled('{a}{b} {"json": {}}', {"a": "{b}", "b": 1}, "") == '{b}1 {"json": {}}', "values are not templates"
    for unfit, *words in (
        ("{query} #", "sums.jsonl, line 1", "'query'", "data.prompt_template", "question, answer, parts"),
        ("Solve it.", "data.prompt_template=Solve it.", "{question}"),
        ("{parts}", "sums.jsonl, line 1", "parts", "list"),
    ):
        with refuses(DataError, *words):
            load(tmp_path, {"question": "1+1?", "answer": "2", "parts": [1]}, prompt_template=unfit)


def test_the_other_columns_are_kept_for_the_reward_function_as_far_as_it_takes_them(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "2", "level": 3, "hint": None, "extra_info": {"unit": "m"}}
    assert load(tmp_path, row)[0].columns == {}
    assert load(tmp_path, row, kept=["level", "colour"])[0].columns == {"level": 3}
    kept = load(tmp_path, row, kept=None, needed=["hint", "unit"])[0].columns
    assert kept == {"question": "1+1?", "answer": "2", "level": 3, "hint": None}


def test_what_a_policy_cannot_see_or_hear_is_refused(tmp_path: Path) -> None:
    for name, value in (("images", [{"path": "1.png"}]), ("image", "1.png"), ("videos", ["a"]), ("audios", ["a"])):
        row = {"prompt": [USER], "answer": "2", name: value}
        for kept in ((), None):
            with refuses(DataError, f"{tmp_path}/sums.jsonl, line 1", name, "text"):
                load(tmp_path, row, kept=kept)
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
    assert not any("extra_info" in note for note in unread_notes(KEY, rows, "tool_agent", has_environment=True))


def test_the_name_of_a_source() -> None:
    for location, name in (
        ("data/sums.jsonl, line 3", "sums"),
        ("data, new/train-00000-of-00002.parquet, row 1", "train"),
        ("data/sums/0000.parquet, row 1", "sums"),
        ("hf:openai/gsm8k/main:test, row 9", "openai/gsm8k/main"),
    ):
        assert source_name(location) == name
