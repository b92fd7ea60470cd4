"""What sequences may have besides prompt, response and mask, and the columns of it.

Branches: the column `predecessors`, which only batches of an agent's episodes have. An agent may sample from several
histories: it asks sub-agents, shortens what lies behind, or tries a turn again. All of it is one response, and each
token is there once. A token's predecessor is the one that it follows in the text that the policy saw: a number in the
response; from -1, the prompt's last token, backwards a token of the prompt; and one before the prompt's first token
for what begins anew. It comes before the token. Of a response without branches it is the token right before.

Recorded experts: which experts of a mixture each token went to in the engine, layer by layer. They travel as two ragged
columns beside the tokens, `prompt_routes` and `routes`: (tokens, layers, experts per token), uint8, or uint16 where a
layer has more than 256 experts. A layer without experts has zeros. A token whose experts are not known has the largest
number everywhere, which different experts of a layer cannot all have; the trainer's router chooses for it. The last
token that was sampled is one of them: nothing has been computed from it.

Prompts of the teacher of a policy that teaches itself: `teacher_prompts` is what the reference reads in place of a
response's prompt; where a teacher can be shown nothing, it is empty, and `teacher_mask` 0 on the whole response.

A score token: what a model with one output reads behind each response.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_dist.protocol.data_proto import DataProto
from grpo_dist.protocol.fields import NO_LABEL
from grpo_dist.protocol.ragged import Ragged

PREDECESSORS = "predecessors"
PROMPT_ROUTES, ROUTES = "prompt_routes", "routes"
UNKNOWN_ROUTES = "unknown_routes"
TEACHER_PROMPTS, TEACHER_MASK = "teacher_prompts", "teacher_mask"


def branch_starts(predecessors: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    """Return the tokens of a response that do not follow the one right before, (B,) int64."""
    follows = np.asarray(predecessors, np.int64)
    return np.flatnonzero(follows != np.arange(-1, len(follows) - 1))


def last_branch(predecessors: Sequence[int] | np.ndarray) -> tuple[int, np.ndarray]:
    """Follow the text that ends with the last token back to the prompt.

    Returns:
        (the prompt's token that it goes on from, as a predecessor; numbers of its response's tokens, ascending).
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


def unknown_routes(count: int, like: np.ndarray) -> np.ndarray:
    """Return the experts of so many tokens of which none are known, in the form of other ones."""
    return np.full((count, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def are_unknown(routes: torch.Tensor) -> torch.Tensor:
    """Tell of (..., layers, experts per token) recorded experts which tokens have none, (...) bool."""
    return (routes.int() == torch.iinfo(routes.dtype).max).flatten(-2).all(-1)


def route_columns(prompt: int, lengths: Sequence[int], routes: Sequence[np.ndarray | None]) -> dict[str, Ragged]:
    """Return the columns of the responses to one prompt; {} if nothing was recorded.

    The prompt's are those of the first response, so that it does not matter with whom a response shares a pass.

    Args:
        prompt: tokens of the prompt.
        lengths: tokens of each response.
        routes: of each response what `Response.routes` has.
    """
    known = [rows for rows in routes if rows is not None]
    if not known:
        return {}
    whole = []
    for length, rows in zip(lengths, routes, strict=True):
        behind = known[0][:0] if rows is None else rows
        whole.append(np.concatenate([unknown_routes(prompt + length - len(behind), known[0]), behind]))
    dtype = torch.from_numpy(known[0][:0]).dtype
    return {
        PROMPT_ROUTES: Ragged.from_rows([whole[0][:prompt]] * len(whole), dtype),
        ROUTES: Ragged.from_rows([rows[prompt:] for rows in whole], dtype),
    }


def count_unknown(columns: dict[str, Ragged], follows: Sequence[np.ndarray]) -> torch.Tensor:
    """Count the tokens of each row that another one follows, and whose experts are not known, (N,) int64.

    Args:
        columns: what `route_columns` has returned.
        follows: of each row the predecessors of its response's tokens (branches.py), up to the last sampled one.
    """
    prompts = are_unknown(columns[PROMPT_ROUTES].values).split(columns[PROMPT_ROUTES].lengths.tolist())
    unknown = are_unknown(columns[ROUTES].values).split(columns[ROUTES].lengths.tolist())
    counts = [
        int(before.sum()) + int(row[np.unique(own[own >= 0])].sum())
        for before, row, own in zip(prompts, unknown, follows, strict=True)
    ]
    return torch.tensor(counts, dtype=torch.int64)


def as_teacher_reads(data: DataProto) -> DataProto:
    """Return the same responses behind the prompts of their teacher, where they have one."""
    if TEACHER_PROMPTS not in data.columns():
        return data
    prompts = data["prompts"]
    rows = [
        shown if len(shown) else own for shown, own in zip(data[TEACHER_PROMPTS].rows(), prompts.rows(), strict=True)
    ]
    _, rest = data.pop(("prompts", TEACHER_PROMPTS))
    return rest.union(DataProto.from_dict({"prompts": Ragged.from_rows(rows, prompts.values.dtype)}))


# The token that is appended to a sequence whose score is wanted. No other token sees it, so any id of the vocabulary
# does.
SCORE_TOKEN = 0


def with_score_token(data: DataProto) -> DataProto:
    """Return rows of which a model with one output gives the score: each response gets one more token.

    The score of a sequence is the value at its last token, and a label says what the value at its token should be.
    Values are read at the token before, so both belong to the token that follows: labels move one token on.

    Args:
        data: `prompts` and `responses` (which may be empty), and where there are some `labels` and `uid`.

    Returns:
        These columns (without rows some may be missing), and `response_mask`: 1 on labelled, else appended tokens.
    """
    if not len(data):
        return data
    responses = [torch.cat([row, row.new_full((1,), SCORE_TOKEN)]) for row in data["responses"].rows()]
    columns = {"prompts": data["prompts"], "responses": Ragged.from_rows(responses, torch.int32)}
    if "labels" in data.batch:
        rows = [torch.cat([row.new_full((1,), NO_LABEL), row]) for row in data["labels"].rows()]
        columns["labels"] = Ragged.from_rows(rows, torch.int8)
        mask = [row != NO_LABEL for row in rows]
    else:
        mask = [torch.arange(len(row)) == len(row) - 1 for row in responses]
    columns["response_mask"] = Ragged.from_rows(mask, torch.int8)
    uid = {name: column for name, column in data.non_tensor_batch.items() if name == "uid"}
    return DataProto.from_dict(columns, uid)
