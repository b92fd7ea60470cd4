"""Advantages: how much better a response is than what the group (or batch) would have done.

    outcome.py  a response against its group, by one score: grpo (Dr. GRPO), grpo_passk, maxrl, lite_ppo, scale_rl,
                rl_zvp, a2po, rloo, opo, gpg; against its agent's earlier ones: rae; by many: gdpo
    returns.py  the rewards that follow a token: reinforce_plus_plus(_baseline), remax, distill, gae,
                optimal_token_baseline; those of steps and turns: grpo_process, gigpo

Call them through `compute_advantage`. inputs.py has their one signature, a group's statistics and agents' sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The imports fill the registry.
from grpo_dist.algorithms.advantage import inputs, outcome, returns  # noqa: F401
from grpo_dist.algorithms.advantage.inputs import ADVANTAGE, STD_EPS, AdvantageInputs, Groups
from grpo_dist.errors import BatchError

__all__ = ["ADVANTAGE", "DEFAULTS", "STD_EPS", "AdvantageInputs", "Groups", "compute_advantage"]

# Options that are not given.
DEFAULTS: dict[str, Any] = {
    "norm_adv_by_std_in_grpo": True,
    "gamma": 1.0,
    "lam": 1.0,
    "f_norm": 1.0,
    "zvp_alpha": 0.1,
    "step_advantage_w": 1.0,
    "a2po_beta": 0.5,
}


def compute_advantage(
    name: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any] | np.ndarray | Tensor | None = None,
    agent_ids: Tensor | None = None,
    values: Tensor | None = None,
    entropies: Tensor | None = None,
    gradient_norms: Tensor | None = None,
    turn_states: Tensor | None = None,
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
        agent_ids: (N, T), of `agent_id`, 0 on tokens of no agent: each agent's tokens are a sequence of their
            own, which is compared with those of `AgentSequences.groups`.
        values: (N, T), a critic's values (gae).
        entropies: (N, T), of the policy before the update, nats (rl_zvp).
        gradient_norms: (N, T), 1 - 2 p + sum p^2 of the policy before the update (optimal_token_baseline).
        turn_states: (N, T), of `targets.turn_states` (gigpo).
        reward_baselines: (N,), scores of the greedy responses (remax).
        step_mask: (N, T), 1 on the last token of each step (grpo_process).
        reward_components: scores (N,) by name, nan where a response has none (gdpo).
        config: verl's option names, `DEFAULTS` has those that are not given; and what `rae` goes by.

    Returns:
        (advantages, returns), each (N, T) float32, 0 off the mask.
    """
    estimator = ADVANTAGE.get(name)
    shape = tuple(token_level_rewards.shape)
    tokens = {
        "values": values,
        "entropies": entropies,
        "gradient_norms": gradient_norms,
        "turn_states": turn_states,
        "step_mask": step_mask,
    }
    for column, value in {"response_mask": response_mask, "reward_baselines": reward_baselines, **tokens}.items():
        wanted = shape[:1] if column == "reward_baselines" else shape
        if value is not None and tuple(torch.as_tensor(value).shape) != wanted:
            raise BatchError(f"{column} is {tuple(torch.as_tensor(value).shape)}, token_level_rewards {shape}")
    if index is not None and len(index) != shape[0]:
        raise BatchError(f"index has {len(index)} entries for {shape[0]} sequences")
    options, rewards, mask = {**DEFAULTS, **(config or {})}, token_level_rewards.float(), response_mask.float()
    if agent_ids is not None and index is not None:
        sequences = inputs.AgentSequences.of(agent_ids)
        groups = Groups.of(sequences.groups(index)).to(rewards.device)
        keys = inputs.baseline_keys(sequences.roles, options.get("sources"), sequences.rows)
        own = {"groups": groups, "baseline_keys": keys, **sequences.split(tokens)}
        batch = AdvantageInputs(rewards[sequences.rows] * sequences.own, mask[sequences.rows] * sequences.own, own)
        advantages, returns = (
            torch.zeros(shape).index_add_(0, sequences.rows, part) for part in estimator(batch, options)
        )
        return advantages, returns
    optional = {
        "groups": None if index is None else Groups.of(index).to(rewards.device),
        "baseline_keys": inputs.baseline_keys(torch.zeros(shape[0], dtype=torch.int64), options.get("sources")),
        "reward_baselines": reward_baselines,
        "reward_components": reward_components,
        **tokens,
    }
    return estimator(AdvantageInputs(rewards, mask, optional), options)
