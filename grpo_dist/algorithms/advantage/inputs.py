"""What an advantage estimator is given, statistics of groups, and the registry of estimators.

Every estimator has one signature,

    estimator(batch: AdvantageInputs, config: Mapping[str, Any]) -> (advantages, returns)

with `config` a mapping of verl's option names and both outputs (N, T) float32, 0 off the mask.

Statistics over the responses to one prompt need no loop over groups. Sums are taken in float64: a group of equal
float32 rewards then has exactly its reward as mean and 0 as spread.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.aggregate import tensor_fault
from grpo_dist.errors import BatchError
from grpo_dist.plugins.registry import Fault, Registry, described

# Keeps the division finite for a group whose rewards are (nearly) all equal; verl's value.
STD_EPS = 1e-6


@dataclass(frozen=True)
class Groups:
    """N responses in G = `count` groups; `ids` is (N,) int64, the group 0..G-1 of each response."""

    ids: Tensor
    count: int

    @classmethod
    def of(cls, index: Sequence[Any] | np.ndarray | Tensor) -> Groups:
        """Equal labels form a group; N labels of any hashable kind."""
        if isinstance(index, Tensor):
            ids = torch.unique(index, return_inverse=True)[1]
        else:
            _, inverse = np.unique(np.asarray([str(label) for label in index]), return_inverse=True)
            ids = torch.from_numpy(inverse.astype(np.int64).reshape(-1))
        return cls(ids, int(ids.max()) + 1 if len(ids) else 0)

    def to(self, device: torch.device) -> Groups:
        """Return the groups on another device."""
        return Groups(self.ids.to(device), self.count)

    @property
    def sizes(self) -> Tensor:
        """(N,) float64: how many responses each one's group has."""
        return torch.bincount(self.ids, minlength=self.count).double()[self.ids]

    def sum(self, values: Tensor) -> Tensor:
        """(N,) float64: the sum of (N,) `values` over each one's group."""
        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add_(0, self.ids, values.double())[self.ids]

    def mean(self, values: Tensor) -> Tensor:
        """(N,) float64: the mean over each one's group."""
        return self.sum(values) / self.sizes

    def std(self, values: Tensor) -> Tensor:
        """(N,) float64: the sample standard deviation (ddof 1) over each one's group; 0 for a group of one."""
        deviation = values.double() - self.mean(values)
        return (self.sum(deviation.square()) / (self.sizes - 1).clamp_min(1)).sqrt()

    def normalise(self, values: Tensor, *, by_std: bool) -> Tensor:
        """(N,) float64: value - mean, divided by std + 1e-6 if asked for, within each group."""
        centred = values.double() - self.mean(values)
        return centred / (self.std(values) + STD_EPS) if by_std else centred

    def rank(self, values: Tensor) -> Tensor:
        """(N,) int64: 0 for the largest value of its group, 1 for the next ...; ties in order of appearance."""
        order = torch.argsort(values, descending=True, stable=True)
        order = order[torch.argsort(self.ids[order], stable=True)]
        sizes = torch.bincount(self.ids, minlength=self.count)
        first = (sizes.cumsum(0) - sizes)[self.ids[order]]
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - first
        return rank


def advantage_fault(returned: Any, batch: Any, config: Mapping[str, Any]) -> Fault | None:
    """Return what is wrong with an advantage estimator's results."""
    shape = batch.response_mask.shape
    expected = f"(advantages, returns), both float tensors of shape {tuple(shape)}, without nan and inf"
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        return described(returned), expected
    for name, value in zip(("advantages", "returns"), returned, strict=True):
        if problem := tensor_fault(value, shape):
            fits_rows = isinstance(value, Tensor) and value.numel() == shape[0]
            remedy = "; batch.on_tokens(numbers) puts a number for each response on its tokens" if fits_rows else ""
            return f"{name} = {problem}", expected + remedy
    return None


Estimator = Callable[..., tuple[Tensor, Tensor]]

ADVANTAGE: Registry[Estimator] = Registry(
    "advantage estimator", "algorithm.adv_estimator", ("batch", "config"), advantage_fault
)


@dataclass(frozen=True)
class AdvantageInputs:
    """A batch of N responses of up to T tokens, right-padded.

    Attributes:
        token_level_rewards: (N, T) float32; an outcome reward sits on the last response token.
        response_mask: (N, T) float32, 1 on the tokens that train.
        optional: what only some estimators need; they ask with `need`.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    optional: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> Tensor:
        """(N,) float64: the summed rewards of each response."""
        return self.token_level_rewards.double().sum(-1)

    @property
    def groups(self) -> Groups:
        """Return the groups: which responses answer the same prompt."""
        return self.need("groups", "index", "compares responses to one prompt and needs their uids")

    def need(self, name: str, argument: str, why: str) -> Any:
        """An optional input."""
        value = self.optional.get(name)
        if value is None:
            raise BatchError(f"`{argument}` is missing: the advantage estimator {why}")
        return value

    def on_tokens(self, per_response: Tensor) -> Tensor:
        """(N,) values on every token of their response that trains: (N, T) float32."""
        return per_response.float().unsqueeze(-1) * self.response_mask


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
