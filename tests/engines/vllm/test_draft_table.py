"""Tokens that have followed, and how often they were right, counted by hand."""

from __future__ import annotations

import pytest

from grpo_dist.engines.vllm.draft_table import (
    CONTEXTS,
    ENTRY_BYTES,
    LAST_PROPOSALS,
    MANY_VOTES,
    Chances,
    DraftTable,
    DraftTables,
)


def drafted(table: DraftTable, tokens: list[int], most: int) -> list[int]:
    return table.draft(tokens, most, 0.0)[0]


def test_the_text_of_an_earlier_response_is_drafted_to_the_length_asked_for() -> None:
    table = DraftTable(Chances())
    table.add([1, 2, 3, 4, 5, 6], 0)
    assert drafted(table, [9, 1, 2, 3], 2) == [4, 5]
    assert drafted(table, [1, 2, 3], 9) == [4, 5, 6], "nothing has followed 6"
    assert drafted(table, [1, 2, 3], 0) == []
    assert drafted(table, [2, 1, 3], 3) == [], "no response had these"
    assert drafted(table, [3], 3) == [], "shorter than any context"


def test_the_longest_context_decides() -> None:
    assert CONTEXTS == (6, 3, 2)
    table = DraftTable(Chances())
    table.add([1, 2, 3, 4, 5, 6, 7], 0)
    for _ in range(2):
        table.add([9, 4, 5, 6, 8], 0)
    assert drafted(table, [4, 5, 6], 1) == [8]
    assert drafted(table, [1, 2, 3, 4, 5, 6], 1) == [7]
    table.add([8, 5, 6, 10], 0)
    assert drafted(table, [0, 5, 6], 1) == [8], "two votes against one"


def test_the_majority_is_drafted() -> None:
    table = DraftTable(Chances())
    for token in (5, 6):
        table.add([1, 2, 3, token], 0)
    assert drafted(table, [1, 2, 3], 1) == [6], "one vote against one takes the place"
    for token in (6, 5, 6):
        table.add([1, 2, 3, token], 0)
    assert drafted(table, [1, 2, 3], 1) == [6]
    for _ in range(300):
        table.add([1, 2, 3, 100_000], 0)
    for _ in range(255):
        assert drafted(table, [1, 2, 3], 1) == [100_000], "votes end at 255"
        table.add([1, 2, 3, 0], 0)
    assert drafted(table, [1, 2, 3], 1) == [0]


def test_tokens_before_the_start_are_only_context() -> None:
    table = DraftTable(Chances())
    table.add([1, 2, 3, 4], 4)
    assert len(table) == 0
    table.add([1, 2, 3, 4, 5], 4)
    assert drafted(table, [2, 3, 4], 2) == [5]
    assert len(table) == 2, "5 tokens are no context of length 6"


def test_what_was_drafted_is_context_of_the_next_draft() -> None:
    table = DraftTable(Chances())
    table.add([1, 2, 3, 1, 2, 3], 0)
    assert drafted(table, [1, 2, 3], 5) == [1, 2, 3, 1, 2]


def test_a_chance_is_the_share_of_proposals_of_its_kind_that_were_right() -> None:
    chances = Chances()
    for right in (True, True, False):
        chances.note(1, 2, right)
    step = 1 / LAST_PROPOSALS
    assert chances.of(1, 2) == pytest.approx((2 * step - step**2) * (1 - step))
    assert chances.of(1, 3) == chances.of(0, 2) == 0
    chances.note(0, MANY_VOTES + 7, True)
    assert chances.of(0, MANY_VOTES) == chances.of(0, MANY_VOTES + 100) == step


def test_each_token_tells_whether_its_proposal_was_right_and_drafts_end_where_it_is_seldom() -> None:
    chances = Chances()
    table = DraftTable(chances)
    table.add([1, 2, 3], 0)
    assert chances.of(2, 1) == 0, "nothing was proposed"
    for _ in range(1000):
        table.add([1, 2, 3], 0)
    assert chances.of(2, MANY_VOTES) == pytest.approx(1, abs=1e-6)
    table.add([1, 2, 3, 4], 3)
    text, each = table.draft([1, 2], 9, 0.5)
    assert (text, each) == ([3], [pytest.approx(1, abs=1e-6)]), "4 was never proposed"
    for _ in range(MANY_VOTES):
        table.add([1, 2, 3, 4], 3)
    assert table.draft([1, 2], 9, 0.01) == ([3, 4], [each[0], pytest.approx(1 / LAST_PROPOSALS, abs=1e-6)])


def test_prompts_have_tables_of_their_own_and_the_oldest_go() -> None:
    tables = DraftTables(most_entries=5)
    tables.add(1, [1, 2, 3, 4], 0)
    assert tables.num_bytes == 3 * ENTRY_BYTES
    tables.add(2, [1, 2, 5], 0)
    assert drafted(tables.of(2), [1, 2], 1) == [5]
    assert drafted(tables.of(1), [1, 2], 1) == [3], "asked for last"
    tables.add(3, [7, 8, 9, 10], 0)
    assert tables.num_bytes == 3 * ENTRY_BYTES
    assert drafted(tables.of(2), [1, 2], 1) == []
    assert drafted(tables.of(1), [1, 2], 1) == []
    tables.add(3, list(range(20)), 0)
    assert tables.num_bytes == 0, "one prompt alone has too many"
