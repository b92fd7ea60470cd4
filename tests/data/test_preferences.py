"""Rows of preference data: the forms that people have, and what is said of a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.data.preferences import load_pairs, load_steps
from grpo_dist.errors import DataError
from tests.messages import refuses

KEY = "reward_model.train_files"
SYSTEM = {"role": "system", "content": "Add."}
ASKED = {"role": "user", "content": "1+1=?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


FORMS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("form", list(FORMS))
def test_pairs_in_every_form(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, FORMS[form], FORMS["texts"])
    for number, pair in enumerate(load_pairs([path], key=KEY), 1):
        assert (pair.prompt, pair.chosen, pair.rejected) == ([ASKED], [said("2")], [said("3")])
        assert pair.location == f"{path}, line {number}"


def test_the_prompt_is_what_conversations_begin_with(tmp_path: Path) -> None:
    """Several turns; the answers may be several messages, and of different number."""
    first = [SYSTEM, ASKED, said("2"), {"role": "user", "content": "Sure?"}]
    rejected = [said("No."), {"role": "user", "content": "Oh."}, said("3")]
    path = write(tmp_path, {"chosen": [*first, said("Yes.")], "rejected": [*first, *rejected]})
    (pair,) = load_pairs([path], key=KEY)
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
    path = write(tmp_path, FORMS["texts"], row)
    with refuses(DataError, KEY, f"{path}, line 2", *parts):
        load_pairs([path], key=KEY)


def test_labelled_steps(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "1+1+1=?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]},
        {"prompt": [ASKED], "completions": ["2"], "labels": [1]},
    )
    two, one = load_steps([path], key=KEY)
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
        load_steps([path], key=KEY)
