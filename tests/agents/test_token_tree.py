"""The tree of an episode's tokens, on paper."""

from __future__ import annotations

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


def test_a_call_goes_on_from_its_own_place() -> None:
    """Two calls have sampled the same; the third goes on from the second of them."""
    tree = TokenTree([7], 20)
    places = [tree.add([7], sampled(1)) for _ in range(2)]
    assert tree.add([5], sampled(2), places[1]) == 3
    assert tree.response.predecessors == [-1, -1, 1, 2]
    assert tree.walk([5, 2, 9], places[1]) == (3, 2)
    assert tree.walk([5], places[0]) == (0, 0)
    assert tree.walk([7, 1]) == (0, 2)
