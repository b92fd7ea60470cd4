"""Rows of supervised fine-tuning: the forms that people have, and what is said of a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.data.chat_rows import Chat, load_chats
from grpo_dist.errors import DataError
from tests.messages import refuses

KEY = "data.train_files"
SYSTEM = {"role": "system", "content": "Add."}
ASKED = {"role": "user", "content": "1+1=?"}
SURE = {"role": "user", "content": "Sure?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: str, messages_key: str = "messages") -> list[Chat]:
    return load_chats([path], key=KEY, messages_key=messages_key)


FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASKED, said("2")]},
    "messages, and a prompt that repeats them": {"messages": [ASKED, said("2")], "prompt": "1+1=?"},
    "texts": {"prompt": "1+1=?", "completion": "2"},
    "texts, and null": {"prompt": "1+1=?", "completion": "2", "messages": None},
    "lists": {"prompt": [ASKED], "completion": [said("2")], "score": 1.5},
    "a list and a text": {"prompt": [ASKED], "completion": "2"},
}


@pytest.mark.parametrize("form", list(FORMS))
def test_every_form(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, FORMS[form], FORMS["texts"])
    for number, chat in enumerate(load(path), 1):
        assert chat == Chat(f"{path}, line {number}", [ASKED, said("2")], (1,))


def test_what_is_trained_of_several_turns(tmp_path: Path) -> None:
    """Of a conversation all messages of the assistant; of a completion its own only."""
    turns = [SYSTEM, ASKED, said("2"), SURE, said("Yes."), SURE]
    path = write(tmp_path, {"messages": turns}, {"prompt": turns[:4], "completion": turns[4:]})
    whole, completed = load(path)
    assert whole.messages == completed.messages == turns
    assert (whole.trained, completed.trained) == ((2, 4), (4,))


def test_a_turn_may_be_a_call_without_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    for content in ({}, {"content": None}, {"content": ""}):
        (chat,) = load(write(tmp_path, {"messages": [ASKED, call | content]}))
        assert chat.messages == [ASKED, call | {"content": ""}]
    assert load(write(tmp_path, {"prompt": "1+1=?", "completion": [call]}))[0].trained == (1,)
    with refuses(DataError, f"{tmp_path}/rows.jsonl, line 1", "message 2", "text"):
        load(write(tmp_path, {"messages": [ASKED, {"role": "assistant"}]}))


def test_what_is_not_read_is_noted(tmp_path: Path) -> None:
    (chat,) = load(write(tmp_path, FORMS["messages"] | {"tools": [{"type": "function"}], "enable_thinking": True}))
    assert chat.unread == ("tools", "enable_thinking")


def test_parquet_and_a_column_of_another_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"conversation": [ASKED, said("2") | {"name": "B"}]}]), path)
    (chat,) = load(str(path), "conversation")
    assert chat == Chat(f"{path}, row 1", [ASKED, said("2") | {"name": "B"}], (1,))


BROKEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no form": (
        {"question": "a", "answer": "b"},
        ("'messages'", "data.messages_key=messages", "'prompt'", "'completion'", "question, answer"),
    ),
    "no completion": ({"prompt": "a"}, ("'messages'", "'completion'")),
    "no prompt": ({"completion": "a"}, ("'prompt'",)),
    "both forms": ({"messages": [ASKED, said("2")], "completion": "2"}, ("data.messages_key=messages", "completion")),
    "messages as a text": ({"messages": "a"}, ("data.messages_key=messages", "str 'a'")),
    "a message without a role": ({"messages": [ASKED, {"content": "b"}]}, ("messages", "message 2", "role")),
    "content that is no text": ({"messages": [ASKED, said("2") | {"content": None}]}, ("messages", "message 2")),
    "no assistant": ({"messages": [SYSTEM, ASKED, SURE]}, ("messages", "'assistant'", "system, user")),
    "another name of the role": (
        {"messages": [ASKED, {"role": "gpt", "content": "2"}]},
        ("messages", "'assistant'", "user, gpt"),
    ),
    "an assistant in the prompt only": (
        {"prompt": [ASKED, said("2")], "completion": [SURE]},
        ("completion", "'assistant'"),
    ),
    "the assistant begins": ({"messages": [said("Hello."), ASKED, said("2")]}, ("messages", "user")),
    "an empty answer": ({"messages": [ASKED, said("2"), SURE, said(" \n")]}, ("messages", "message 4")),
    "an empty completion": ({"prompt": "a", "completion": ""}, ("completion", "empty")),
    "a turn in two": (
        {"prompt": [ASKED, said("Let ")], "completion": "me see."},
        ("prompt", "completion", "assistant"),
    ),
    "a picture": ({"messages": [ASKED, said("2")], "images": ["1.png"]}, ("images", "text")),
    "an empty prompt": ({"prompt": " ", "completion": "a"}, ("prompt", "empty")),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_row_is_named_by_file_row_and_column(tmp_path: Path, case: str) -> None:
    row, parts = BROKEN[case]
    path = write(tmp_path, FORMS["texts"], row)
    with refuses(DataError, KEY, f"{path}, line 2", *parts):
        load(path)
