"""Tokens that have followed, counted by hand."""

from __future__ import annotations

from grpo_dist.engines.vllm.draft_table import CONTEXTS, ENTRY_BYTES, DraftTable, DraftTables


def test_the_text_of_an_earlier_response_is_drafted_to_the_length_asked_for() -> None:
    table = DraftTable()
    table.add([1, 2, 3, 4, 5, 6], 0)
    assert table.draft([9, 1, 2, 3], 2) == [4, 5]
    assert table.draft([1, 2, 3], 9) == [4, 5, 6], "nothing has followed 6"
    assert table.draft([1, 2, 3], 0) == []
    assert table.draft([2, 1, 3], 3) == [], "no response had these"
    assert table.draft([2, 3], 3) == [], "shorter than any context"


def test_the_longest_context_decides() -> None:
    assert CONTEXTS == (6, 3)
    table = DraftTable()
    table.add([1, 2, 3, 4, 5, 6, 7], 0)
    for _ in range(2):
        table.add([9, 4, 5, 6, 8], 0)
    assert table.draft([4, 5, 6], 1) == [8]
    assert table.draft([1, 2, 3, 4, 5, 6], 1) == [7]


def test_the_majority_is_drafted() -> None:
    table = DraftTable()
    for token in (5, 6):
        table.add([1, 2, 3, token], 0)
    assert table.draft([1, 2, 3], 1) == [6], "one vote against one takes the place"
    for token in (6, 5, 6):
        table.add([1, 2, 3, token], 0)
    assert table.draft([1, 2, 3], 1) == [6]
    for _ in range(300):
        table.add([1, 2, 3, 100_000], 0)
    for _ in range(255):
        assert table.draft([1, 2, 3], 1) == [100_000], "votes end at 255"
        table.add([1, 2, 3, 0], 0)
    assert table.draft([1, 2, 3], 1) == [0]


def test_tokens_before_the_start_are_only_context() -> None:
    table = DraftTable()
    table.add([1, 2, 3, 4], 4)
    assert len(table) == 0
    table.add([1, 2, 3, 4, 5], 4)
    assert table.draft([2, 3, 4], 2) == [5]
    assert len(table) == 1, "5 tokens are no context of length 6"


def test_what_was_drafted_is_context_of_the_next_draft() -> None:
    table = DraftTable()
    table.add([1, 2, 3, 1, 2, 3], 0)
    assert table.draft([1, 2, 3], 5) == [1, 2, 3, 1, 2]


def test_prompts_have_tables_of_their_own_and_the_oldest_go() -> None:
    tables = DraftTables(most_entries=4)
    tables.add(1, [1, 2, 3, 4, 5], 0)
    assert tables.num_bytes == 2 * ENTRY_BYTES
    tables.add(2, [1, 2, 3, 5, 6], 0)
    assert tables.of(2).draft([1, 2, 3], 1) == [5]
    assert tables.of(1).draft([1, 2, 3], 1) == [4], "asked for last"
    tables.add(3, [7, 8, 9, 10], 0)
    assert tables.num_bytes == 3 * ENTRY_BYTES
    assert tables.of(2).draft([1, 2, 3], 1) == []
    assert tables.of(1).draft([1, 2, 3], 1) == [4]
    tables.add(3, list(range(20)), 0)
    assert tables.num_bytes == 0, "one prompt alone has too many"
