"""How many tokens are drafted, on machines whose seconds a step are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from grpo_dist.engines.vllm.draft_length import KNOWN, LOOKING, TRY_EVERY, DraftLength


def used(length: DraftLength, chances: list[list[float]], seconds: Callable[[int], float], steps: int) -> list[int]:
    """How many tokens of all sequences were drafted in each of so many steps."""
    drafted = []
    for _ in range(steps):
        known = length.seconds_to_look(len(chances)) > 0
        drafted.append(sum(length.choose(chances)) if known else 0)
        length.note(len(chances) + drafted[-1], drafted[-1] > 0, seconds(len(chances) + drafted[-1]))
    return drafted


def powers(chance: float, most: int) -> list[float]:
    return [chance**place for place in range(1, most + 1)]


def test_nothing_is_looked_up_before_the_steps_of_so_many_sequences_are_known() -> None:
    length = DraftLength()
    for steps in range(KNOWN):
        assert length.seconds_to_look(4) == 0, steps
        length.note(4, False, 2.0)
    assert length.seconds_to_look(4) == 2.0 * LOOKING
    assert length.seconds_to_look(32) == 0
    assert length.seconds_to_look(0) == 0
    assert length.choose([]) == []
    assert length.choose([[], []]) == [0, 0]


def test_drafts_that_cost_nothing_are_as_long_as_they_may_be() -> None:
    drafted = used(DraftLength(), [powers(0.9, 8)], lambda computed: 1.0, 1000)
    assert drafted[:KNOWN] == [0] * KNOWN
    assert Counter(drafted)[8] > 980


def test_drafts_that_cost_more_than_they_give_are_tried_seldom() -> None:
    """A token costs as much beside others as alone, and half of the drafts are right: each unknown number of tokens is
    tried as often as makes it known, and the shortest drafts in one step of TRY_EVERY."""
    drafted = used(DraftLength(), [powers(0.5, 8)] * 64, float, 128 * 10)
    tried = {64: KNOWN + 9, 128: KNOWN, 192: KNOWN}
    assert Counter(drafted) == {0: 1280 - sum(tried.values()), **tried}
    assert drafted[-1] == 0


def test_the_length_between_is_found() -> None:
    """0.75 s and 0.25 s a token, 0.7 of the drafts right: tokens a second 1, 1.36, 1.46, 1.45, 1.39, ..."""
    drafted = used(DraftLength(), [powers(0.7, 8)], lambda computed: 0.75 + computed / 4, 1000)
    assert Counter(drafted[100:]).most_common(1)[0][0] == 2


def test_sequences_are_drafted_by_their_own_chances() -> None:
    """4 tokens take 1 s, and each more 0.08 s: with 3 drafts 6.2 in 1.24 s, with all 7 in 1.88 s."""
    chances, length = [[0.9, 0.8], [0.1] * 8, [0.5], []], DraftLength()
    used(length, chances, lambda computed: 1 + 0.08 * (computed - 4), 100)
    assert length.choose(chances) == [2, 0, 1, 0]


def test_what_becomes_better_is_found_and_what_becomes_worse_is_left() -> None:
    length, chances = DraftLength(), [[0.5]] * 4
    assert used(length, chances, lambda computed: computed, 200)[-1] == 0
    assert used(length, chances, lambda computed: 1.0, TRY_EVERY * 40)[-1] == 4
    assert used(length, chances, lambda computed: computed, 300)[-1] == 0


@pytest.mark.parametrize("slow", [3.0, 300.0])
def test_a_step_that_something_else_held_up_changes_little(slow: float) -> None:
    length, chances = DraftLength(), [[0.4]]
    used(length, chances, lambda computed: 0.5 + 0.5 * computed, 60)
    assert length.choose(chances) == [0]
    length.note(1, False, slow)
    assert length.choose(chances) == [0]
