"""Responses with branches: the column `predecessors`, which only batches of an agent's episodes have.

An agent may sample from several histories: it asks sub-agents, shortens what lies behind, or tries a turn again. All of
it is one response, and each token is there once. A token's predecessor is the one that it follows in the text that the
policy saw: a number in the response; from -1, the prompt's last token, backwards a token of the prompt; and one before
the prompt's first token for what begins anew. It comes before the token. Of a response without branches it is the
token right before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from grpo_dist.protocol.data_proto import DataProto
from grpo_dist.protocol.ragged import Ragged

PREDECESSORS = "predecessors"


def branch_starts(predecessors: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    """Return the tokens of a response that do not follow the one right before, (B,) int64."""
    follows = np.asarray(predecessors, np.int64)
    return np.flatnonzero(follows != np.arange(-1, len(follows) - 1))


def last_branch(predecessors: Sequence[int] | np.ndarray) -> tuple[int, np.ndarray]:
    """Follow the text that ends with the last token back to the prompt.

    Returns:
        (the token of the prompt that it goes on from, as a predecessor; numbers of the response's tokens in it,
        ascending).
    """
    follows = np.asarray(predecessors, np.int64)
    starts = branch_starts(follows)
    parts, place = [np.empty(0, np.int64)], len(follows) - 1
    while place >= 0:
        before = starts[: np.searchsorted(starts, place, "right")]
        start = int(before[-1]) if len(before) else 0
        parts.append(np.arange(start, place + 1))
        place = int(follows[start])
    return place, np.concatenate(parts[::-1])


def scored_branches(data: DataProto) -> Ragged:
    """Return the tokens of each response that are read as its text: those of the last branch."""
    responses = data["responses"]
    if PREDECESSORS not in data.columns():
        return responses
    pairs = zip(responses.rows(), data[PREDECESSORS].rows(), strict=True)
    return Ragged.from_rows([row[last_branch(follows)[1]] for row, follows in pairs], responses.values.dtype)
