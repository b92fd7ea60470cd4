"""Rows that one model is trained on: the forms that people have, and what is said of a broken one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.data.training_rows import Conversation, checked_rows, conversation_row, pair_row, steps_row
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


def load(path: str, messages_key: str = "messages") -> list[Conversation]:
    check = functools.partial(conversation_row, messages_key=messages_key)
    return checked_rows([path], key=KEY, check=check)


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASKED, said("2")]},
    "messages, and a prompt that repeats them": {"messages": [ASKED, said("2")], "prompt": "1+1=?"},
    "texts": {"prompt": "1+1=?", "completion": "2"},
    "texts, and null": {"prompt": "1+1=?", "completion": "2", "messages": None},
    "lists": {"prompt": [ASKED], "completion": [said("2")], "score": 1.5},
    "a list and a text": {"prompt": [ASKED], "completion": "2"},
}


@pytest.mark.parametrize("form", list(CONVERSATIONS))
def test_conversations_in_every_form(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, CONVERSATIONS[form], CONVERSATIONS["texts"])
    for number, chat in enumerate(load(path), 1):
        assert chat == Conversation(f"{path}, line {number}", [ASKED, said("2")], (1,))


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
    (chat,) = load(
        write(tmp_path, CONVERSATIONS["messages"] | {"tools": [{"type": "function"}], "enable_thinking": True})
    )
    assert chat.unread == ("tools", "enable_thinking")


def test_parquet_and_a_column_of_another_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"conversation": [ASKED, said("2") | {"name": "B"}]}]), path)
    (chat,) = load(str(path), "conversation")
    assert chat == Conversation(f"{path}, row 1", [ASKED, said("2") | {"name": "B"}], (1,))


BROKEN_CONVERSATIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
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


@pytest.mark.parametrize("case", list(BROKEN_CONVERSATIONS))
def test_a_broken_conversation_is_named_by_file_row_and_column(tmp_path: Path, case: str) -> None:
    row, parts = BROKEN_CONVERSATIONS[case]
    path = write(tmp_path, CONVERSATIONS["texts"], row)
    with refuses(DataError, KEY, f"{path}, line 2", *parts):
        load(path)


PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "1+1=?", "chosen": "2", "rejected": "3"},
    "messages": {"prompt": [ASKED], "chosen": [said("2")], "rejected": [said("3")]},
    "a prompt, and texts": {"prompt": [ASKED], "chosen": "2", "rejected": "3"},
    "whole conversations": {"chosen": [ASKED, said("2")], "rejected": [ASKED, said("3")]},
    "whole conversations, and null": {"prompt": None, "chosen": [ASKED, said("2")], "rejected": [ASKED, said("3")]},
    "whole conversations, and their prompt": {
        "prompt": "1+1=?",
        "chosen": [ASKED, said("2")],
        "rejected": [ASKED, said("3")],
        "score": 1.5,
    },
}


@pytest.mark.parametrize("form", list(PAIRS))
def test_pairs_in_every_form(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, PAIRS[form], PAIRS["texts"])
    for number, pair in enumerate(checked_rows([path], key=KEY, check=pair_row), 1):
        assert (pair.prompt, pair.chosen, pair.rejected) == ([ASKED], [said("2")], [said("3")])
        assert pair.location == f"{path}, line {number}"


def test_the_prompt_is_what_conversations_begin_with(tmp_path: Path) -> None:
    """Several turns; the answers may be several messages, and of different number."""
    first = [SYSTEM, ASKED, said("2"), {"role": "user", "content": "Sure?"}]
    rejected = [said("No."), {"role": "user", "content": "Oh."}, said("3")]
    path = write(tmp_path, {"chosen": [*first, said("Yes.")], "rejected": [*first, *rejected]})
    (pair,) = checked_rows([path], key=KEY, check=pair_row)
    assert (pair.prompt, pair.chosen, pair.rejected) == (first, [said("Yes.")], rejected)


BROKEN_PAIRS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no rejected": ({"prompt": "a", "chosen": "b"}, ("'rejected'", "prompt, chosen")),
    "chosen is a number": ({"prompt": "a", "chosen": 3, "rejected": "b"}, ("chosen", "int 3")),
    "a message without a role": ({"prompt": "a", "chosen": [{"content": "b"}], "rejected": "c"}, ("chosen", "role")),
    "an empty answer": ({"prompt": "a", "chosen": " ", "rejected": "c"}, ("chosen", "empty")),
    "an empty prompt": ({"prompt": "", "chosen": "b", "rejected": "c"}, ("prompt", "empty")),
    "texts without a prompt": ({"chosen": "a b", "rejected": "a c"}, ("chosen", "'prompt'")),
    "no common start": ({"chosen": [ASKED, said("2")], "rejected": [SYSTEM, said("2")]}, ("rejected", "'prompt'")),
    "only a prompt": ({"chosen": [ASKED], "rejected": [ASKED, said("2")]}, ("chosen", "prompt")),
    "the same answers": ({"prompt": "a", "chosen": "b", "rejected": "b"}, ("chosen", "rejected")),
}


@pytest.mark.parametrize("case", list(BROKEN_PAIRS))
def test_a_broken_pair_is_named_by_file_row_and_column(tmp_path: Path, case: str) -> None:
    row, parts = BROKEN_PAIRS[case]
    path = write(tmp_path, PAIRS["texts"], row)
    with refuses(DataError, KEY, f"{path}, line 2", *parts):
        checked_rows([path], key=KEY, check=pair_row)


def test_labelled_steps(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "1+1+1=?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]},
        {"prompt": [ASKED], "completions": ["2"], "labels": [1]},
    )
    two, one = checked_rows([path], key=KEY, check=steps_row)
    assert (two.steps, two.labels) == (["1+1=2", "2+1=4"], [True, False])
    assert two.prompt == [{"role": "user", "content": "1+1+1=?"}]
    assert (one.prompt, one.steps, one.labels) == ([ASKED], ["2"], [True])
    assert one.location == f"{path}, line 2"


BROKEN_STEPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no labels": ({"prompt": "a", "completions": ["b"]}, ("'labels'",)),
    "too few labels": ({"prompt": "a", "completions": ["b", "c"], "labels": [True]}, ("labels", "2", "[True]")),
    "a label of another kind": ({"prompt": "a", "completions": ["b"], "labels": ["+"]}, ("labels", "['+']")),
    "a label between": ({"prompt": "a", "completions": ["b"], "labels": [0.5]}, ("labels", "[0.5]")),
    "steps as one text": ({"prompt": "a", "completions": "b", "labels": [True]}, ("completions", "str 'b'")),
    "an empty step": ({"prompt": "a", "completions": ["b", "\n"], "labels": [True, True]}, ("completions",)),
    "no steps": ({"prompt": "a", "completions": [], "labels": []}, ("completions", "list []")),
}


@pytest.mark.parametrize("case", list(BROKEN_STEPS))
def test_broken_steps_are_named_by_file_row_and_column(tmp_path: Path, case: str) -> None:
    row, parts = BROKEN_STEPS[case]
    path = write(tmp_path, {"prompt": "a", "completions": ["b"], "labels": [True]}, row)
    with refuses(DataError, KEY, f"{path}, line 2", *parts):
        checked_rows([path], key=KEY, check=steps_row)
