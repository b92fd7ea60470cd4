"""The runs of tokens that the rows of a batch consist of, and which of them lie together in a tensor row.

A response follows its prompt token by token, unless an agent has sampled several branches. Then the column
`predecessors` says which token each one follows, and the row is a tree that begins with its prompt. A run is a stretch
of it: tokens that follow one another, of which only the last may be followed by other runs too.

    prompt              [s s s][u u u]          a sub-agent whose prompt differs from the third token on
    response                   [a a a][t t]     two turns ...
                                      [b b]     ... and the second one sampled again
                          [v v c c]             the sub-agent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from grpo_dist.engines.train.micro_batch_plan import group_rows
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.sequences import PREDECESSORS, branch_starts


class Run(NamedTuple):
    """Tokens `start` to `end` of the prompt or of the response of a row.

    Attributes:
        row: of the batch.
        in_prompt: whether they are the prompt's.
        start: the first token.
        end: the one behind the last.
        parent: the run whose last token the first one follows, a number in the same piece; -1: it begins a sequence.
    """

    row: int
    in_prompt: bool
    start: int
    end: int
    parent: int


def cut_into_pieces(data: DataProto, layout: str) -> list[list[Run]]:
    """Return the pieces of a batch: the runs that lie together in a tensor row, one behind the other.

    Args:
        data: has `prompts`, `responses` and, where rows have branches, `predecessors`.
        layout: "shared": a piece is a prompt with all rows that have it, and each run is there once, with all that
            follows it right behind it. Else: a piece is a path from the beginning of a prompt to a run that none
            follows, so that what several branches have in common is there several times.
    """
    prompts, responses = data["prompts"].lengths.tolist(), data["responses"].lengths.tolist()
    predecessors = data[PREDECESSORS].rows() if PREDECESSORS in data.batch else [None] * len(data)
    groups = group_rows(data) if layout == "shared" else np.arange(len(data))
    pieces: list[list[Run]] = []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group).tolist()
        tree = _tree(prompts[rows[0]], {row: _cut(responses[row], predecessors[row]) for row in rows})
        pieces += [_ordered(tree)] if layout == "shared" else _paths(tree)
    return pieces


def num_tokens(piece: list[Run]) -> int:
    """Return how many tokens a piece has."""
    return sum(run.end - run.start for run in piece)


def response_tokens(data: DataProto, layout: str) -> np.ndarray:
    """Return how many tokens each row takes besides its prompt, (N,) int64."""
    if layout == "shared" or PREDECESSORS not in data.batch:
        return data["responses"].lengths.numpy()
    tokens = -data["prompts"].lengths.numpy()
    for piece in cut_into_pieces(data, layout):
        tokens[piece[-1].row] += num_tokens(piece)
    return tokens


def _cut(length: int, predecessors: Sequence[int] | None) -> list[tuple[int, int, int]]:
    """Cut a response into runs: (start, end, what the first token follows)."""
    if predecessors is None or not length:
        return [(0, length, -1)]
    follows = np.asarray(predecessors)
    starts = branch_starts(follows)
    forks = follows[starts] + 1
    bounds = np.unique(np.concatenate([[0, length], starts, forks[forks > 0]]))
    return [(start, end, int(follows[start])) for start, end in pairwise(bounds.tolist())]


def _tree(prompt: int, responses: Mapping[int, list[tuple[int, int, int]]]) -> list[Run]:
    """The runs of a prompt of so many tokens and of the responses of rows, parents first."""
    first = next(iter(responses))
    forks = {prompt + follows + 1 for runs in responses.values() for _, _, follows in runs if follows < 0}
    tree = [Run(first, True, *bounds, i - 1) for i, bounds in enumerate(pairwise(sorted({0, prompt} | forks)))]
    ends = {run.end: i for i, run in enumerate(tree)}
    for row, runs in responses.items():
        own: dict[int, int] = {}
        for start, end, follows in runs:
            parent = own[follows + 1] if follows >= 0 else ends.get(prompt + follows + 1, -1)
            own[end] = len(tree)
            tree.append(Run(row, False, start, end, parent))
    return tree


def _ordered(tree: list[Run]) -> list[Run]:
    """The runs in preorder: behind each one come those that follow it, each with all that follows."""
    children: dict[int, list[int]] = {}
    for i, run in enumerate(tree):
        children.setdefault(run.parent, []).append(i)
    places: dict[int, int] = {-1: -1}
    waiting = children[-1][::-1]
    while waiting:
        i = waiting.pop()
        places[i] = len(places) - 1
        waiting += children.get(i, [])[::-1]
    return [tree[i]._replace(parent=places[tree[i].parent]) for i in list(places)[1:]]


def _paths(tree: list[Run]) -> list[list[Run]]:
    """The paths that end in a run of a response that none follows."""
    parents = {run.parent for run in tree}
    paths = []
    for i, run in enumerate(tree):
        if i in parents or run.in_prompt:
            continue
        path = [run]
        while path[0].parent >= 0:
            path.insert(0, tree[path[0].parent])
        paths.append([part._replace(parent=number - 1) for number, part in enumerate(path)])
    return paths
