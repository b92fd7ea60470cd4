"""The tokens of each agent of an episode as a sequence of its own, and which sequences are compared."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Of a number: ROLES names times ATTEMPTS, so that it is an int32.
ROLES, ATTEMPTS = 2**23 - 1, 256


def agent_id(name: str) -> int:
    """Return a number of an agent, from 1 to 2^31 - 1, which its name alone decides; see `name_fault`."""
    role, attempt = _parsed(name)
    return 1 + zlib.crc32(role.encode()) % ROLES * ATTEMPTS + attempt + 1


def baseline_keys(roles: Tensor, sources: Tensor | None, rows: Tensor | slice = slice(None)) -> Tensor:
    """(S,) int64: a number of each agent in its data source, of `sources[rows]`; without `sources` the agent's own."""
    return roles if sources is None else roles + sources[rows].long() * 2**32


def name_fault(name: str) -> str:
    """Say what is wrong with an agent's name; "" if nothing is: `NAME:k` is the attempt k of the agent NAME."""
    too_many = _parsed(name)[1] > ATTEMPTS - 2
    return f"agent_name={name!r}: attempts of an agent are numbered from 0 to {ATTEMPTS - 2}" if too_many else ""


def _parsed(name: str) -> tuple[str, int]:
    """Return the agent and the attempt, -1: it is none."""
    role, _, attempt = name.rpartition(":")
    return (role, int(attempt)) if role and attempt.isdecimal() else (name, -1)


class AgentSequences(NamedTuple):
    """S sequences of the agents of N episodes.

    Attributes:
        rows: (S,) int64, each one's episode.
        own: (S, T) bool, its tokens.
        roles: (S,) int64, number of the agent's name, 0 for the empty one.
        attempts: (S,) int64, 1 + k for the attempt k, else 0.
    """

    rows: Tensor
    own: Tensor
    roles: Tensor
    attempts: Tensor

    @classmethod
    def of(cls, agent_ids: Tensor) -> AgentSequences:
        """Those of (N, T) numbers of `agent_id`, 0 on tokens of no agent."""
        rows, tokens = (agent_ids > 0).nonzero(as_tuple=True)
        rows, agents = torch.stack([rows, agent_ids[rows, tokens].long()]).unique(dim=1)
        return cls(rows, agent_ids[rows] == agents[:, None], (agents - 1) // ATTEMPTS, (agents - 1) % ATTEMPTS)

    def groups(self, index: Sequence[Any] | np.ndarray | Tensor) -> list[tuple[Any, ...]]:
        """Label the sequences that are compared with each other.

        Those of one name in the episodes of a group are; attempts, which go by what their own episode has set them,
        only with the attempts of the same agent in the same episode (hierarchical baselines).
        """
        of = zip(self.rows.tolist(), self.roles.tolist(), self.attempts.tolist(), strict=True)
        return [(str(index[row]), role, row if attempt else None) for row, role, attempt in of]

    def split(self, columns: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return (N, T) columns as (S, T), 0 on tokens of others."""
        return {name: None if values is None else values[self.rows] * self.own for name, values in columns.items()}


def mean_scores(
    rewards: Tensor, agent_ids: Tensor | None, sources: Tensor | None = None
) -> dict[int, tuple[float, int]]:
    """Return the mean score of each agent in each data source by `baseline_keys`, and of how many sequences.

    Args:
        rewards: (N, T), of each token.
        agent_ids: (N, T) numbers of `agent_id`; None: each response is one sequence, of the agent with no name.
        sources: (N,) numbers of their names below 2^31; None: all are one.
    """
    if agent_ids is None:
        keys = baseline_keys(torch.zeros(len(rewards), dtype=torch.int64), sources)
        scores = rewards.double().sum(-1)
    else:
        sequences = AgentSequences.of(agent_ids)
        keys = baseline_keys(sequences.roles, sources, sequences.rows)
        scores = (rewards[sequences.rows].double() * sequences.own).sum(-1)
    return {int(key): (float(scores[keys == key].mean()), int((keys == key).sum())) for key in keys.unique()}
