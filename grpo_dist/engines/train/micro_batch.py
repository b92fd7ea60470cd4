"""Rows of a batch as tensors for one forward pass, in one of three layouts.

    padded  one sequence per tensor row, padded on the right; a causal model needs no mask. The reference.
    packed  several sequences per tensor row; each attends to itself only.
    shared  the responses of a prompt follow it once, [prompt | r1 | ... | rn]: a response attends to the prompt and to
            itself, and its positions go on from the prompt's end. n(P + R) tokens become P + nR. A response may have
            branches, and then each of its tokens is there once. (Prefix sharing as in verl's prefix grouper and AReaL's
            tree training; here it is a mask, so that any rotary model takes it.)

A response follows its prompt token by token, unless an agent has sampled several branches. Then the column
`predecessors` says which token each one follows, and the row is a tree that begins with its prompt. A run is a stretch
of it: tokens that follow one another, of which only the last may be followed by other runs too.

    prompt              [s s s][u u u]          a sub-agent whose prompt differs from the third token on
    response                   [a a a][t t]     two turns ...
                                      [b b]     ... and the second one sampled again
                          [v v c c]             the sub-agent

What enters and leaves an engine is ragged; padding stays in this file and its callers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_dist.engines.train.micro_batch_plan import first_fit, group_rows
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.media import MEDIA, Media, Picture, media_of
from grpo_dist.protocol.sequences import PREDECESSORS, PROMPT_ROUTES, ROUTES, branch_starts

# Segment of padding tokens; they see each other, so that their attention is defined.
PADDING = -1


class Run(NamedTuple):
    """Tokens `start` to `end` of the prompt or of the response of a row.

    Attributes:
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


@dataclass(frozen=True)
class MicroBatch:
    """N sequences for one forward pass in B tensor rows; M response tokens in all, T in the longest response.

    Attributes:
        input_ids: (B, L) int64.
        position_ids: (B, L) int64.
        segments: (2, B, L) int32, or None where the causal mask is enough: the segment of each token, and the last one
            of those that follow its segment. A token sees those before it whose segments its own follows.
        predictors: (M,) int64, which of the B * L tokens predicts each response token.
        targets: (M,) int64, the response tokens.
        slots: (M,) int64, where they are among the N * T.
        response_mask: (N, T) float32, 1 on response tokens that train.
        columns: per-token columns of the batch, padded to (N, T), or (N, T, H).
        routes: (B, L, layers, experts per token) recorded experts; None: the batch has none.
        pictures: the different ones of all prompts.
        features: (B, L) int64, which of their outputs each token stands for (`lay_pictures`); None: there are none.
        shifts: (B, L, 3) int64, what rotary positions in time, height and width are beyond `position_ids`; None: 0.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor | None
    predictors: Tensor
    targets: Tensor
    slots: Tensor
    response_mask: Tensor
    columns: dict[str, Tensor]
    routes: Tensor | None = None
    pictures: tuple[Picture, ...] = ()
    features: Tensor | None = None
    shifts: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on `device`; its copies have their place in the device's work, and nobody waits."""
        moved: dict[str, Any] = {k: _sent(v, device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return MicroBatch(**moved | {"columns": {name: _sent(v, device) for name, v in self.columns.items()}})

    def to_rows(self, values: Tensor) -> Tensor:
        """(M, ...) numbers of the response tokens -> (N, T, ...), 0 elsewhere; gradients flow."""
        flat = values.new_zeros(self.response_mask.numel(), *values.shape[1:])
        return flat.index_copy(0, self.slots, values).unflatten(0, self.response_mask.shape)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor to a device. A GPU copies by itself, while the host goes on, out of pinned memory alone."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def make_micro_batch(
    data: DataProto,
    columns: Sequence[str],
    padding_id: int,
    *,
    layout: str = "shared",
    row_width: int = 0,
    min_width: int = 0,
    multiple: int = 1,
) -> MicroBatch:
    """Lay out the rows of `data`, which has `prompts`, `responses`, `response_mask` and the ragged `columns`.

    An empty `data` gives one sequence of a few padding tokens whose mask is 0: a rank without rows still takes part in
    the collectives of the forward and backward pass. Tensor rows of packed and shared sequences may grow to `row_width`
    tokens (0: as long as the longest piece), and have at least `min_width`, a multiple of `multiple`.
    """
    if len(data) == 0:
        return _empty_micro_batch(columns, padding_id, 2 * multiple, segmented=layout != "padded")
    pieces = cut_into_pieces(data, layout)
    lengths = [num_tokens(piece) for piece in pieces]
    if layout == "padded":
        bins = [[i] for i in range(len(pieces))]
    else:
        bins = first_fit(lengths, max(row_width, *lengths))
    width = max(sum(lengths[i] for i in members) for members in bins)
    if layout != "padded":
        width = -(-max(width, min_width) // multiple) * multiple
    builder = _Builder(data, len(bins), width, padding_id)
    if layout == "padded":  # positions go on behind a sequence, or it would look like the start of another one
        builder.position_ids[:] = torch.arange(width)
    for row, members in enumerate(bins):
        for i in members:
            builder.add(row, pieces[i])
    mask = data["response_mask"].to_padded(0).float()
    return MicroBatch(
        input_ids=builder.input_ids,
        position_ids=builder.position_ids,
        segments=None if layout == "padded" else builder.segments,
        predictors=torch.cat(builder.predictors),
        targets=data["responses"].values.long(),
        slots=torch.nonzero((torch.arange(mask.shape[1]) < data["responses"].lengths.unsqueeze(1)).flatten()).flatten(),
        response_mask=mask,
        columns={name: data[name].to_padded(0.0) for name in columns},
        routes=builder.routes,
        pictures=builder.pictures,
        features=builder.features,
        shifts=builder.shifts,
    )


class _Builder:
    """Writes pieces into the tensors of a micro-batch, each row from left to right."""

    def __init__(self, data: DataProto, num_rows: int, width: int, padding_id: int) -> None:
        self.prompts, self.responses = data["prompts"].rows(), data["responses"].rows()
        self.input_ids = torch.full((num_rows, width), padding_id, dtype=torch.int64)
        # of padding 0: a larger one may be beyond the model's positions, or decide how the real ones are embedded
        self.position_ids = torch.zeros((num_rows, width), dtype=torch.int64)
        self.segments = torch.full((2, num_rows, width), PADDING, dtype=torch.int32)
        self.predictors = [torch.zeros(len(response), dtype=torch.int64) for response in self.responses]
        self.routes: Tensor | None = None
        if ROUTES in data.batch:
            values = data[ROUTES].values  # of padding none are known
            self.routes = values.new_full((num_rows, width, *values.shape[1:]), torch.iinfo(values.dtype).max)
            self._recorded = data[PROMPT_ROUTES].rows(), data[ROUTES].rows()
        self.pictures: tuple[Picture, ...] = ()
        self.features: Tensor | None = None
        self.shifts: Tensor | None = None
        if MEDIA in data.columns():
            self.features = torch.full((num_rows, width), -1)
            self.pictures, self._seen = lay_pictures(media_of(data), data["prompts"].lengths.tolist())
            if any(picture.positions is not None for picture in self.pictures):
                self.shifts = torch.zeros((num_rows, width, 3), dtype=torch.int64)
        self._filled = [0] * num_rows
        self._num_segments = 0

    def add(self, row: int, piece: Sequence[Run]) -> None:
        lasts = list(range(self._num_segments, self._num_segments + len(piece)))
        for i in reversed(range(len(piece))):
            if (parent := piece[i].parent) >= 0:
                lasts[parent] = max(lasts[parent], lasts[i])
        ends: list[tuple[int, int]] = []  # of each run: its last token's place in the tensor row, the position behind
        for run, last in zip(piece, lasts, strict=True):
            before, position = ends[run.parent] if run.parent >= 0 else (self._filled[row], 0)
            start, length = self._filled[row], run.end - run.start
            end = self._filled[row] = start + length
            tokens = (self.prompts if run.in_prompt else self.responses)[run.row]
            self.input_ids[row, start:end] = tokens[run.start : run.end]
            self.position_ids[row, start:end] = torch.arange(position, position + length)
            self.segments[0, row, start:end] = self._num_segments + len(ends)
            self.segments[1, row, start:end] = last
            if self.routes is not None:
                recorded = self._recorded[0 if run.in_prompt else 1][run.row]
                self.routes[row, start:end] = recorded[run.start : run.end]
            if self.features is not None and run.in_prompt:
                self.features[row, start:end] = self._seen[run.row][0][run.start : run.end]
            if self.shifts is not None:
                of_row = self._seen[run.row][1]
                self.shifts[row, start:end] = of_row[run.start : run.end] if run.in_prompt else of_row[-1]
            if not run.in_prompt and length:  # each token is predicted by the one that it follows
                places = torch.arange(start - 1, end - 1)
                places[0] = before
                self.predictors[run.row][run.start : run.end] = row * self.input_ids.shape[1] + places
            ends.append((end - 1, position + length) if length else (before, position))
        self._num_segments += len(piece)


def lay_pictures(
    column: Sequence[Media | None], lengths: Sequence[int]
) -> tuple[tuple[Picture, ...], list[tuple[Tensor, Tensor]]]:
    """Say where the outputs of a batch's different pictures go, which are numbered one behind the other.

    Returns:
        (the pictures, of each prompt of such a length its tokens' numbers, (P,) int64, -1: the token's own embedding,
        and what M-RoPE adds to their positions and to those of what follows them, (P + 1, 3): a picture's tokens have
        their places in it, and the text behind it goes on at the largest of these (arXiv 2409.12191)).
    """
    first: dict[str, int] = {}
    pictures: list[Picture] = []
    count, seen = 0, []
    for media, length in zip(column, lengths, strict=True):
        numbers, shifts, shift = torch.full((length,), -1), torch.zeros((length + 1, 3), dtype=torch.int64), 0
        for picture, offset in () if media is None else zip(media.pictures, media.offsets, strict=True):
            if picture.digest not in first:
                first[picture.digest], count = count, count + int(picture.embedded.sum())
                pictures.append(picture)
            places = torch.from_numpy(offset + picture.embedded.nonzero()[0])
            numbers[places] = first[picture.digest] + torch.arange(len(places))
            if picture.positions is not None:
                end = offset + len(picture.positions)
                shifts[offset:end] = shift + torch.tensor(picture.positions) - torch.arange(end - offset)[:, None]
                shift += int(picture.positions.max()) + 1 - (end - offset)
                shifts[end:] = shift
        seen.append((numbers, shifts))
    return tuple(pictures), seen


def _empty_micro_batch(columns: Sequence[str], padding_id: int, width: int, *, segmented: bool) -> MicroBatch:
    one = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        input_ids=torch.full((1, width), padding_id, dtype=torch.int64),
        position_ids=torch.arange(width).unsqueeze(0),
        segments=torch.zeros(2, 1, width, dtype=torch.int32) if segmented else None,
        predictors=one,
        targets=one,
        slots=one,
        response_mask=torch.zeros(1, 1),
        columns={name: torch.zeros(1, 1) for name in columns},
    )
