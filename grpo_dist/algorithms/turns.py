"""Where the turns of an episode are in a row of its tokens, what was said before them, and what answers them.

`sampled`, (N, T), is 1 on tokens that the policy has sampled. `predecessors`, (N, T), says which token each one follows
in a row with branches (protocol/sequences.py), -1 on padding; None: each follows the one right before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def turn_states(responses: Tensor, sampled: Tensor, predecessors: Tensor | None = None) -> Tensor:
    """Number what an agent has been told before each of its turns, as gigpo compares them.

    A turn is a run of sampled tokens of which each follows the one right before, up to where something else was sampled
    too. What was put in before it is looked for on its own path, up to the turn before or into the prompt; what lies
    further back is not compared.

    Args:
        responses: (N, T) int64 token ids.

    Returns:
        (N, T) int64, equal on turns before which the same tokens were put in, 0 off the turns; negative on the first
        token of a turn that stands right behind another one.
    """
    states, known, tokens = torch.zeros_like(responses), dict[tuple[int, bytes], int](), responses.cpu().numpy()
    for row, is_sampled, follows, run in _rows(sampled, predecessors):
        for start in np.unique(run[is_sampled]).tolist():
            place, told = int(follows[start]), b""
            while place >= 0 and not is_sampled[place]:
                told = tokens[row, run[place] : place + 1].tobytes() + told
                place = int(follows[run[place]])
            state = known.setdefault((min(place, 0), told), len(known) + 1)
            states[row, torch.from_numpy(is_sampled & (run == start))] = state
            if start and is_sampled[start - 1]:
                states[row, start] = -state
    return states


def answers(sampled: Tensor, predecessors: Tensor | None = None) -> Tensor:
    """(N, T) float32: 1 on what was put in right behind the last token of a turn, up to the next turn; and on padding.

    The prompt of a call is no answer, wherever in the row it stands: not what begins a row or a branch, nor what goes
    on from within a turn, as where a history is written in another way.
    """
    out = torch.zeros(sampled.shape)
    for row, is_sampled, follows, run in _rows(sampled, predecessors):
        put_in, before = ~is_sampled & (follows[run] >= 0), np.maximum(follows[run], 0)
        goes_on = np.append(is_sampled[1:] & (follows[1:] == np.arange(len(follows) - 1)), False)
        answer = put_in & (is_sampled & ~goes_on)[before]
        while (more := answer | (put_in & answer[before])).sum() > answer.sum():
            answer = more
        out[row] = torch.from_numpy(answer)
    return out


def _rows(sampled: Tensor, predecessors: Tensor | None) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Of each row its number, what was sampled, what each token follows, and where each one's run begins: (T,) each."""
    place = np.arange(sampled.shape[1])
    for row, is_sampled in enumerate((sampled > 0).cpu().numpy()):
        follows = place - 1 if predecessors is None else predecessors[row].long().cpu().numpy()
        branches = follows != place - 1
        begins = branches | (is_sampled != np.roll(is_sampled, 1))
        left = follows[branches & is_sampled & (follows >= 0)]  # behind these something else was sampled too
        begins[left[is_sampled[left] & is_sampled[left + 1]] + 1] = True
        begins[:1] = True
        yield row, is_sampled, follows, np.maximum.accumulate(np.where(begins, place, 0))
