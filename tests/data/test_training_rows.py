"""Rows that one model is trained on: the forms that people have, and what is said of a broken one."""

import functools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.data.training_rows import (
    Conversation,
    JudgedResponses,
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
        {"messages": [ASKED, said("2")], "prompt": "1+1=?"},  # which repeats them
        {"prompt": "1+1=?", "completion": "2"},
        {"prompt": "1+1=?", "completion": "2", "messages": None},
        {"prompt": [ASKED], "completion": [said("2")], "score": 1.5},
        {"prompt": [ASKED], "completion": "2"},
    ]
    for number, chat in enumerate(load(tmp_path, "conversation", *forms), 1):
        assert chat == Conversation(f"{tmp_path}/rows.jsonl, line {number}", [ASKED, said("2")], (1,))
    path, messages = tmp_path / "rows.parquet", [ASKED, said("2") | {"name": "B"}]
    pq.write_table(pa.Table.from_pylist([{"conversation": messages}]), path)
    check = functools.partial(conversation_row, messages_key="conversation")
    assert checked_rows([str(path)], key=KEY, check=check) == [Conversation(f"{path}, row 1", messages, (1,))]


def test_what_is_trained_and_what_is_not_read(tmp_path: Path) -> None:
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
    for prompt, steps, labels in (("1+1=?", ["1+1=2", "2+1=4"], [True, False]), ([ASKED], ["2"], [1])):
        (found,) = load(tmp_path, "steps", {"prompt": prompt, "completions": steps, "labels": labels})
        assert found == LabelledSteps(f"{tmp_path}/rows.jsonl, line 1", [ASKED], steps, labels)
        assert {*map(type, found.labels)} == {bool}


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


# --- judged responses on disk: which of them a reward model is trained on ---------------------------------------------
def row(question: str, *steps: str, labels: list[bool] | None = None) -> dict:
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "completions": list(steps), "labels": labels or [True] * len(steps)}


def store(tmp_path: Path, *steps: list[dict]) -> JudgedResponses:
    made = JudgedResponses(tmp_path / "replay")
    made.folder.mkdir(parents=True)
    for step, rows in enumerate(steps, 1):
        made.file(step).write_text("".join(json.dumps(each) + "\n" for each in rows))
    return made


def told(rows: list[LabelledSteps]) -> list[tuple[str, str]]:
    return [(each.prompt[0]["content"], "".join(each.steps)) for each in rows]


def test_an_iteration_and_a_share_of_what_was_before(tmp_path: Path) -> None:
    made = store(tmp_path, *[[row(f"q{step}", f"a{i}") for i in range(10)] for step in range(1, 5)])
    fresh, replayed, repeated = made.select(3, 4, 0.1, seed=1)
    assert told(fresh) == [(f"q{step}", f"a{i}") for step in (3, 4) for i in range(10)]
    assert (len(replayed), repeated) == (2, 0), "a tenth of twenty"
    assert {question for question, _ in told(replayed)} <= {"q1", "q2"}
    assert told(made.select(3, 4, 0.1, seed=1).replayed) == told(replayed)
    whole = told(made.select(3, 4, 1.0, seed=2).replayed)
    assert whole == [(f"q{step}", f"a{i}") for step in (1, 2) for i in range(10)]
    others = {tuple(told(made.select(3, 4, 0.1, seed=seed).replayed)) for seed in range(8)}
    assert len(others) > 1, "another seed, another choice"
    assert made.select(1, 2, 0.5, seed=1).replayed == []


def test_a_conversation_counts_once_where_it_came_first(tmp_path: Path) -> None:
    """However it is divided into steps; an empty step has an empty file."""
    again = [row("q", "a"), row("q", "b"), row("q", "b"), row("r", "a")]
    last = [row("q", "b"), row("s", "x", "y"), row("s", "xy")]
    made = store(tmp_path, [row("q", "a"), row("q", "a")], [], again, last)
    fresh, replayed, repeated = made.select(3, 4, 1.0, seed=0)
    assert told(replayed) == [("q", "a")]
    assert repeated == 4, "a, and b twice more, of q; xy of s in other steps"
    assert made.select(3, 4, 0.0, seed=0).repeated == 3, "what was before is not read without a share"
    assert told(fresh) == [("q", "b"), ("r", "a"), ("s", "xy")]
    assert [each.labels for each in fresh] == [[True], [True], [True, True]]


def test_the_responses_of_a_run_are_not_all_in_memory(tmp_path: Path) -> None:
    """Of four times as many steps, each with 200 kB, a hundredth is chosen: little more memory, not four times."""

    def peak(folder: Path, steps: int) -> int:
        made = store(folder, *[[row(f"q{step}", f"{i}" * 20_000) for i in range(10)] for step in range(1, steps + 1)])
        tracemalloc.start()
        fresh, replayed, _ = made.select(steps, steps, 0.01, seed=1)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (len(fresh), len(replayed)) == (10, round(0.1 * (steps - 1)))
        return found

    assert peak(tmp_path / "many", 40) < 2 * peak(tmp_path / "few", 10)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    made = store(tmp_path, [row("q", "a")], [row("r", "a")])
    made.check(range(1, 3))
    made.file(1).unlink()
    assert told(made.select(2, 2, 0.0, seed=0).fresh) == [("r", "a")], "without a share nothing earlier is read"
    with refuses(DataError, "reward_model.replay_share", str(made.file(1)), "step 1"):
        made.select(2, 2, 0.1, seed=0)
    with refuses(DataError, "reward_model.replay_share", str(made.file(1))):
        made.check(range(1, 3))
    made.file(1).write_text('{"prompt": "q", "completions": ["a"], "labels": []}\n')
    with refuses(DataError, made.file(1)):
        made.select(1, 2, 0.1, seed=0)
