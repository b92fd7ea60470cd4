"""The tree of an episode's tokens, on paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from grpo_dist.agents.token_tree import NO_VERSION, TokenTree
from grpo_dist.engines.base import Response


def sampled(*token_ids: int) -> Response:
    return Response(list(token_ids), [-0.5] * len(token_ids), False, [3] * len(token_ids))


def test_what_is_there_is_not_put_in_again() -> None:
    """A prompt that differs from its third token on, and one that differs from the first on."""
    tree = TokenTree([7, 7, 8], 11)
    assert tree.add([7, 7, 8], sampled(1, 2)) == 1
    assert tree.add([7, 7, 9, 9], sampled(3)) == 4
    assert tree.add([7, 7, 9, 9], sampled(3)) == 5
    assert tree.add([6], sampled(4)) == 7
    row = tree.response
    assert row.token_ids == [1, 2, 9, 9, 3, 3, 6, 4]
    assert row.predecessors == [-1, 0, -2, 2, 3, 3, -4, 6]
    assert row.mask == [1, 1, 0, 0, 1, 1, 0, 1]
    assert row.log_probs == [-0.5, -0.5, 0, 0, -0.5, -0.5, 0, -0.5]
    assert row.weight_versions == [3, 3, NO_VERSION, NO_VERSION, 3, 3, NO_VERSION, 3]
    assert len(tree) == 8
    assert (tree.add([7, 7, 8], sampled(5)), len(tree)) == (None, 8), "there is room for 11, the prompt's 3 among them"


def recorded(start: int, count: int) -> np.ndarray:
    """One layer, one expert, numbers from `start`; the last token has none."""
    return np.array([*range(start, start + count - 1), 255], np.uint8)[:, None, None]


def test_tokens_keep_the_experts_of_the_call_that_computed_them_first() -> None:
    """A prompt of 3 and two tokens; a call that goes on behind them, and is asked for no more than what is new."""
    tree = TokenTree([7, 7, 8], 20)
    assert tree.known_routes([7, 7, 8], None, 3) == 0
    assert tree.add([7, 7, 8], replace(sampled(1, 2), routes=recorded(10, 5))) == 1
    assert tree.known_routes([5, 6], 1, 7) == 4, "all but the last that was sampled, and what is put in behind it"
    assert tree.add([5, 6], replace(sampled(3), routes=recorded(30, 4)), 1) == 4
    column = tree.routes.column(3, 5)
    assert column is not None
    assert column[:, 0, 0].tolist() == [10, 11, 12, 13, 30, 31, 32, 255]
    assert tree.known_routes([7, 9], None, 2) == 1, "another prompt, from its second token on"
    assert tree.add([7, 9], replace(sampled(4), routes=recorded(50, 3))) == 6
    column = tree.routes.column(3, 7)
    assert column is not None
    assert column[:, 0, 0].tolist() == [10, 11, 12, 13, 30, 31, 32, 255, 51, 255]


def test_without_recorded_experts_there_are_none() -> None:
    tree = TokenTree([7], 20)
    tree.add([7], sampled(1))
    assert tree.routes.column(1, 1) is None
    assert tree.known_routes([7, 1, 5], None, 3) == 0


def test_a_call_goes_on_from_its_own_place() -> None:
    """Two calls have sampled the same; the third goes on from the second of them."""
    tree = TokenTree([7], 20)
    places = [tree.add([7], sampled(1)) for _ in range(2)]
    assert tree.add([5], sampled(2), places[1]) == 3
    assert tree.response.predecessors == [-1, -1, 1, 2]
    assert tree.walk([5, 2, 9], places[1]) == (3, 2)
    assert tree.walk([5], places[0]) == (0, 0)
    assert tree.walk([7, 1]) == (0, 2)
