"""Rows that one model is trained on: the forms that people have, and what is said of a broken one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.data.training_rows import (
    Conversation,
    LabelledSteps,
    checked_rows,
    conversation_row,
    pair_row,
    steps_row,
)
from grpo_dist.errors import DataError
from tests.messages import refuses

KEY = "data.train_files"
SYSTEM = {"role": "system", "content": "Add."}
ASKED = {"role": "user", "content": "1+1=?"}
SURE = {"role": "user", "content": "Sure?"}
CHECKS: dict[str, Any] = {
    "conversation": functools.partial(conversation_row, messages_key="messages"),
    "pair": pair_row,
    "steps": steps_row,
}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def load(folder: Path, kind: str, *rows: Any) -> list[Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return checked_rows([f"{folder}/rows.jsonl"], key=KEY, check=CHECKS[kind])


def test_conversations_in_every_form(tmp_path: Path) -> None:
    forms: list[dict[str, Any]] = [
        {"messages": [ASKED, said("2")]},
        {"messages": [ASKED, said("2")], "prompt": "1+1=?"},  # which repeats them
        {"prompt": "1+1=?", "completion": "2"},
        {"prompt": "1+1=?", "completion": "2", "messages": None},
        {"prompt": [ASKED], "completion": [said("2")], "score": 1.5},
        {"prompt": [ASKED], "completion": "2"},
    ]
    for number, chat in enumerate(load(tmp_path, "conversation", *forms), 1):
        assert chat == Conversation(f"{tmp_path}/rows.jsonl, line {number}", [ASKED, said("2")], (1,))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"conversation": [ASKED, said("2") | {"name": "B"}]}]), path)
    check = functools.partial(conversation_row, messages_key="conversation")
    (chat,) = checked_rows([str(path)], key=KEY, check=check)
    assert chat == Conversation(f"{path}, row 1", [ASKED, said("2") | {"name": "B"}], (1,))


def test_what_is_trained_and_what_is_not_read(tmp_path: Path) -> None:
    """Of a conversation all messages of the assistant; of a completion its own only."""
    turns = [SYSTEM, ASKED, said("2"), SURE, said("Yes."), SURE]
    forms = {"messages": turns}, {"prompt": turns[:4], "completion": turns[4:]}
    whole, completed = load(tmp_path, "conversation", *forms)
    assert whole.messages == completed.messages == turns
    assert (whole.trained, completed.trained) == ((2, 4), (4,))
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    forms = ({"messages": [ASKED, call | content]} for content in ({}, {"content": None}, {"content": ""}))
    for chat in load(tmp_path, "conversation", *forms, {"prompt": "1+1=?", "completion": [call]}):
        assert (chat.messages, chat.trained) == ([ASKED, call | {"content": ""}], (1,))
    more = {"tools": [{"type": "function"}], "enable_thinking": True}
    (chat,) = load(tmp_path, "conversation", {"messages": [ASKED, said("2")], **more})
    assert chat.unread == ("tools", "enable_thinking")


def test_pairs_in_every_form(tmp_path: Path) -> None:
    whole = {"chosen": [ASKED, said("2")], "rejected": [ASKED, said("3")]}
    forms: list[dict[str, Any]] = [
        {"prompt": "1+1=?", "chosen": "2", "rejected": "3"},
        {"prompt": [ASKED], "chosen": [said("2")], "rejected": [said("3")]},
        {"prompt": [ASKED], "chosen": "2", "rejected": "3"},
        whole,
        whole | {"prompt": None},
        whole | {"prompt": "1+1=?", "score": 1.5},
    ]
    for number, pair in enumerate(load(tmp_path, "pair", *forms), 1):
        assert (pair.prompt, pair.chosen, pair.rejected) == ([ASKED], [said("2")], [said("3")])
        assert pair.location == f"{tmp_path}/rows.jsonl, line {number}"
    # Several turns; the answers may be several messages, and of different number.
    first, rejected = [SYSTEM, ASKED, said("2"), SURE], [said("No."), {"role": "user", "content": "Oh."}, said("3")]
    (pair,) = load(tmp_path, "pair", {"chosen": [*first, said("Yes.")], "rejected": [*first, *rejected]})
    assert (pair.prompt, pair.chosen, pair.rejected) == (first, [said("Yes.")], rejected)


def test_labelled_steps(tmp_path: Path) -> None:
    forms = [
        {"prompt": "1+1=?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]},
        {"prompt": [ASKED], "completions": ["2"], "labels": [1]},
    ]
    at = f"{tmp_path}/rows.jsonl, line"
    assert load(tmp_path, "steps", *forms) == [
        LabelledSteps(f"{at} 1", [ASKED], ["1+1=2", "2+1=4"], [True, False]),
        LabelledSteps(f"{at} 2", [ASKED], ["2"], [True]),
    ]


GOOD = {
    "conversation": {"prompt": "1+1=?", "completion": "2"},
    "pair": {"prompt": "1+1=?", "chosen": "2", "rejected": "3"},
    "steps": {"prompt": "a", "completions": ["b"], "labels": [True]},
}
# By kind: a broken row, and what must be named of it.
BROKEN: dict[str, list[tuple[Any, list[str]]]] = {
    "conversation": [
        ({"question": "a", "answer": "b"}, ["data.messages_key=messages", "'prompt'", "question, answer"]),
        ({"prompt": "a"}, ["'messages'", "'completion'"]),
        ({"completion": "a"}, ["'prompt'"]),
        ({"messages": [ASKED, said("2")], "completion": "2"}, ["data.messages_key=messages", "completion"]),
        ({"messages": "a"}, ["data.messages_key=messages", "str 'a'"]),
        ({"messages": [ASKED, {"content": "b"}]}, ["messages", "message 2", "role"]),
        ({"messages": [ASKED, said("2") | {"content": None}]}, ["messages", "message 2", "text"]),
        ({"messages": [SYSTEM, ASKED, SURE]}, ["messages", "'assistant'", "system, user"]),
        ({"messages": [ASKED, {"role": "gpt", "content": "2"}]}, ["messages", "'assistant'", "user, gpt"]),
        ({"prompt": [ASKED, said("2")], "completion": [SURE]}, ["completion", "'assistant'"]),
        ({"messages": [said("Hello."), ASKED, said("2")]}, ["messages", "user"]),
        ({"messages": [ASKED, said("2"), SURE, said(" \n")]}, ["messages", "message 4"]),
        ({"prompt": "a", "completion": ""}, ["completion", "empty"]),
        ({"prompt": [ASKED, said("Let ")], "completion": "me see."}, ["prompt", "completion", "assistant"]),
        ({"messages": [ASKED, said("2")], "images": ["1.png"]}, ["images", "text"]),
        ({"prompt": " ", "completion": "a"}, ["prompt", "empty"]),
    ],
    "pair": [
        ({"prompt": "a", "chosen": "b"}, ["'rejected'", "prompt, chosen"]),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, ["chosen", "int 3"]),
        ({"prompt": "a", "chosen": [{"content": "b"}], "rejected": "c"}, ["chosen", "role"]),
        ({"prompt": "a", "chosen": " ", "rejected": "c"}, ["chosen", "empty"]),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, ["prompt", "empty"]),
        ({"chosen": "a b", "rejected": "a c"}, ["chosen", "'prompt'"]),
        ({"chosen": [ASKED, said("2")], "rejected": [SYSTEM, said("2")]}, ["rejected", "'prompt'"]),
        ({"chosen": [ASKED], "rejected": [ASKED, said("2")]}, ["chosen", "prompt"]),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ["chosen", "rejected"]),
    ],
    "steps": [
        ({"prompt": "a", "completions": ["b"]}, ["'labels'"]),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True]}, ["labels", "2", "[True]"]),
        ({"prompt": "a", "completions": ["b"], "labels": ["+"]}, ["labels", "['+']"]),
        ({"prompt": "a", "completions": ["b"], "labels": [0.5]}, ["labels", "[0.5]"]),
        ({"prompt": "a", "completions": "b", "labels": [True]}, ["completions", "str 'b'"]),
        ({"prompt": "a", "completions": ["b", "\n"], "labels": [True, True]}, ["completions"]),
        ({"prompt": "a", "completions": [], "labels": []}, ["completions", "list []"]),
    ],
}


@pytest.mark.parametrize(("kind", "row", "parts"), [(kind, *each) for kind in BROKEN for each in BROKEN[kind]])
def test_a_broken_row_is_named_by_file_row_and_column(tmp_path: Path, kind: str, row: Any, parts: list[str]) -> None:
    with refuses(DataError, KEY, f"{tmp_path}/rows.jsonl, line 2", *parts):
        load(tmp_path, kind, GOOD[kind], row)
