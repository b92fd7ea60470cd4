"""Which length of drafts is used, on machines whose seconds a step are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from grpo_dist.engines.vllm.draft_length import KNOWN, TRY_EVERY, DraftLength


def used(length: DraftLength, sequences: int, seconds: Callable[[int], float], share: float, steps: int) -> list[int]:
    """The lengths of so many steps, if each draft is right with this probability: mean tokens."""
    chosen = []
    for _ in range(steps):
        chosen.append(length.choose(sequences))
        tokens = sequences * sum(share**place for place in range(chosen[-1] + 1))
        length.note(sequences, chosen[-1], round(1000 * tokens), seconds(chosen[-1]))
    return chosen


def test_lengths_are_powers_of_two_up_to_the_most() -> None:
    assert DraftLength(1).lengths == [0, 1]
    assert DraftLength(8).lengths == [0, 1, 2, 4, 8]
    assert DraftLength(6).lengths == [0, 1, 2, 4, 6]


def test_drafts_that_cost_nothing_become_as_long_as_they_may() -> None:
    chosen = used(DraftLength(8), 2, lambda length: 1.0, 0.9, 1000)
    assert chosen[: KNOWN + 1] == [0] * KNOWN + [1]
    assert Counter(chosen[100:])[8] > 880


def test_drafts_that_cost_more_than_they_give_are_tried_seldom() -> None:
    chosen = used(DraftLength(8), 64, lambda length: 1.0 + length, 0.5, 128 * 10)
    assert Counter(chosen) == {0: 1280 - KNOWN - 10, 1: KNOWN + 10}, f"beside the first, one step in {TRY_EVERY}"


def test_the_length_between_is_found() -> None:
    """1 + l / 4 seconds, and 0.7 of the drafts right: tokens a second 1, 1.36, 1.46, 1.39, 1.07."""
    chosen = used(DraftLength(8), 8, lambda length: 1 + length / 4, 0.7, 1000)
    assert Counter(chosen[100:]).most_common(1)[0][0] == 2


def test_numbers_of_sequences_learn_apart() -> None:
    length = DraftLength(4)
    used(length, 2, lambda length: 1.0, 0.9, 50)
    assert [length.choose(sequences) for sequences in (1, 2, 3, 4)] == [0, 4, 0, 0]


def test_what_becomes_better_is_found_and_what_becomes_worse_is_left() -> None:
    length = DraftLength(1)
    used(length, 4, lambda length: 1.0 + length, 0.5, 200)
    later = used(length, 4, lambda length: 1.0, 0.9, TRY_EVERY * 40)
    assert later[-1] == 1
    again = used(length, 4, lambda length: 1.0 + length, 0.5, 100)
    assert again[-1] == 0


@pytest.mark.parametrize("slow", [3.0, 300.0])
def test_a_step_that_something_else_held_up_changes_little(slow: float) -> None:
    length = DraftLength(1)
    used(length, 1, lambda length: 1.0 + 0.5 * length, 0.4, 60)
    assert length.choose(1) == 0
    length.note(1, 0, 1000, slow)
    assert length.choose(1) == 0
