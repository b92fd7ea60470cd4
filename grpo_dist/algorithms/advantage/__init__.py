"""Advantages: how much better a response is than what the group (or batch) would have done.

    outcome.py  a response against its group, by one score: grpo (Dr. GRPO), grpo_passk, maxrl, lite_ppo, scale_rl,
                rl_zvp, rloo, opo, gpg; by many: gdpo
    returns.py  the rewards that follow a token: reinforce_plus_plus(_baseline), remax, distill, gae, grpo_process

Call them through `compute_advantage`. inputs.py has their one signature and the statistics of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The imports fill the registry.
from grpo_dist.algorithms.advantage import outcome, returns  # noqa: F401
from grpo_dist.algorithms.advantage.inputs import ADVANTAGE, STD_EPS, AdvantageInputs, Groups
from grpo_dist.errors import BatchError

__all__ = ["ADVANTAGE", "DEFAULTS", "STD_EPS", "AdvantageInputs", "Groups", "compute_advantage"]

# Options that are not given.
DEFAULTS = {"norm_adv_by_std_in_grpo": True, "gamma": 1.0, "lam": 1.0, "f_norm": 1.0, "zvp_alpha": 0.1}


def compute_advantage(
    name: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any] | np.ndarray | Tensor | None = None,
    agent_ids: Tensor | None = None,
    values: Tensor | None = None,
    entropies: Tensor | None = None,
    reward_baselines: Tensor | None = None,
    step_mask: Tensor | None = None,
    reward_components: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns by the estimator called `name`.

    Args:
        name: a registered estimator, or `pkg.module:function`.
        token_level_rewards: (N, T) floats; an outcome reward sits on the last response token.
        response_mask: (N, T), 1 on the tokens that train.
        index: group of each sequence, N hashable entries (`uid`).
        agent_ids: (N, T), equal for the tokens of an agent, 0 for those of none: each agent's tokens are a sequence of
            their own, and its group the agents of the same id in the sequence's group.
        values: (N, T), a critic's values (gae).
        entropies: (N, T), of the policy before the update, nats (rl_zvp).
        reward_baselines: (N,), scores of the greedy responses (remax).
        step_mask: (N, T), 1 on the last token of each step (grpo_process).
        reward_components: scores (N,) by name, nan where a response has none (gdpo).
        config: verl's option names; `DEFAULTS` has those that are not given.

    Returns:
        (advantages, returns), each (N, T) float32, 0 off the mask.
    """
    estimator = ADVANTAGE.get(name)
    shape = tuple(token_level_rewards.shape)
    for column, value, wanted in (
        ("response_mask", response_mask, shape),
        ("values", values, shape),
        ("entropies", entropies, shape),
        ("step_mask", step_mask, shape),
        ("reward_baselines", reward_baselines, shape[:1]),
    ):
        if value is not None and tuple(torch.as_tensor(value).shape) != wanted:
            raise BatchError(f"{column} is {tuple(torch.as_tensor(value).shape)}, token_level_rewards {shape}")
    if index is not None and len(index) != shape[0]:
        raise BatchError(f"index has {len(index)} entries for {shape[0]} sequences")
    if agent_ids is not None and index is not None:
        rows, tokens = (agent_ids > 0).nonzero(as_tuple=True)
        rows, agents = torch.stack([rows, agent_ids[rows, tokens].long()]).unique(dim=1)
        own = agent_ids[rows] == agents[:, None]
        parts = compute_advantage(
            name,
            token_level_rewards=token_level_rewards[rows] * own,
            response_mask=response_mask[rows] * own,
            index=[(index[row], agent) for row, agent in zip(rows.tolist(), agents.tolist(), strict=True)],
            values=None if values is None else values[rows] * own,
            entropies=None if entropies is None else entropies[rows] * own,
            step_mask=None if step_mask is None else step_mask[rows] * own,
            config=config,
        )
        advantages, returns = (torch.zeros(shape).index_add_(0, rows, part) for part in parts)
        return advantages, returns
    optional = {
        "groups": None if index is None else Groups.of(index).to(token_level_rewards.device),
        "values": values,
        "entropies": entropies,
        "reward_baselines": reward_baselines,
        "step_mask": step_mask,
        "reward_components": reward_components,
    }
    batch = AdvantageInputs(token_level_rewards.float(), response_mask.float(), optional)
    return estimator(batch, {**DEFAULTS, **(config or {})})
