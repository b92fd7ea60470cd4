"""Answers beside each other."""

from __future__ import annotations

from grpo_dist.cli.chat import side_by_side


def test_one_answer_is_shown_as_it_is() -> None:
    assert list(side_by_side(["a  b\n\nc"], 20)) == ["a  b\n\nc"]


def test_columns_have_the_same_width_and_wrap() -> None:
    lines = list(side_by_side(["one two", "x\n\ny"], 52))
    assert lines == ["[1]                       [2]", "one two                   x", "", "                          y"]
    assert list(side_by_side(["w " * 20, "z"], 52))[1:3] == [
        f"{' '.join('w' * 12)}   z".replace("   z", " " * 3 + "z"),
        "w w w w w w w w",
    ]


def test_what_has_no_room_comes_below() -> None:
    assert list(side_by_side(["a", "b", "c"], 55)) == [
        "[1]                        [2]",
        "a                          b",
        "[3]",
        "c",
    ]
