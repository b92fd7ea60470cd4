"""Recorded experts: which experts of a mixture each token went to in the engine, layer by layer.

They travel as two ragged columns beside the tokens, `prompt_routes` and `routes`: (tokens, layers, experts per token),
uint8, or uint16 where a layer has more than 256 experts. A layer without experts has zeros. A token whose experts are
not known has the largest number everywhere, which different experts of a layer cannot all have; the trainer's router
chooses for it. The last token that was sampled is one of them: nothing has been computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from grpo_dist.protocol.ragged import Ragged

PROMPT_ROUTES, ROUTES = "prompt_routes", "routes"
UNKNOWN_ROUTES = "unknown_routes"


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
