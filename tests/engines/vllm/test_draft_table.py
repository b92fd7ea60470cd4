"""Tokens that have followed, counted by hand."""

from __future__ import annotations

from grpo_dist.engines.vllm.draft_table import CONTEXTS, ENTRY_BYTES, DraftTable, DraftTables


def test_the_text_of_an_earlier_response_is_drafted_to_the_length_asked_for() -> None:
    table = DraftTable()
    table.add([1, 2, 3, 4, 5, 6], 0)
    assert table.draft([9, 1, 2], 3) == [3, 4, 5]
    assert table.draft([1, 2], 9) == [3, 4, 5, 6], "nothing has followed 6"
    assert table.draft([1, 2], 0) == []
    assert table.draft([2, 1], 3) == [], "no response had these"
    assert table.draft([2], 3) == [], "shorter than any context"


def test_the_longest_context_decides() -> None:
    table = DraftTable()
    table.add([1, 2, 3, 4, 7], 0)
    for _ in range(2):
        table.add([9, 3, 4, 8], 0)
    assert table.draft([3, 4], 1) == [8]
    assert table.draft([1, 2, 3, 4], 1) == [7]


def test_the_majority_is_drafted_and_a_tie_keeps_the_first() -> None:
    table = DraftTable()
    for token in (5, 6):
        table.add([1, 2, token], 0)
    assert table.draft([1, 2], 1) == [6], "one vote against one takes the place"
    for token in (6, 5, 6):
        table.add([1, 2, token], 0)
    assert table.draft([1, 2], 1) == [6]


def test_tokens_before_the_start_are_only_context() -> None:
    table = DraftTable()
    table.add([1, 2, 3], 3)
    assert len(table) == 0
    table.add([1, 2, 3, 4], 3)
    assert table.draft([2, 3], 2) == [4]
    assert len(table) == 1, "3 tokens are the context of length 2 only"


def test_what_was_drafted_is_context_of_the_next_draft() -> None:
    table = DraftTable()
    table.add([1, 2, 1, 2, 1], 0)
    assert table.draft([1, 2], 5) == [1, 2, 1, 2, 1]


def test_prompts_have_tables_of_their_own_and_the_oldest_go() -> None:
    tables = DraftTables(most_entries=4)
    tables.add((1,), [1, 2, 3, 4], 0)
    assert tables.entries == 2
    assert tables.num_bytes == 2 * ENTRY_BYTES
    tables.add((2,), [1, 2, 5, 6], 0)
    assert tables.of((1,)).draft([1, 2], 1) == [3]
    assert tables.of((2,)).draft([1, 2], 1) == [5]
    tables.of((1,))  # asked for last
    tables.add((3,), [7, 8, 9], 0)
    assert tables.entries == 3
    assert tables.of((2,)).draft([1, 2], 1) == []
    assert tables.of((1,)).draft([1, 2], 1) == [3]
    tables.add((3,), list(range(20)), 0)
    assert tables.entries == 0 == len(tables.of((3,))), "one prompt alone has too many"


def test_contexts_are_asked_longest_first() -> None:
    assert sorted(CONTEXTS, reverse=True) == list(CONTEXTS)
