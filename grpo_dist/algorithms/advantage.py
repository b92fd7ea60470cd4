"""Advantages: how much better a response is than what the group (or batch) would have done.

Shapes: N sequences, T response tokens (right-padded). Every estimator has one signature,

    estimator(token_level_rewards, response_mask, index, config) -> (advantages, returns)

with `token_level_rewards` (N, T) float32, `response_mask` (N, T) 1 on response tokens, `index` length N (equal
entries form a group) and `config` a mapping of verl's option names. Both outputs are (N, T) float32, 0 off the mask.
Call them through `compute_advantage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.errors import BatchError
from grpo_dist.registry import Registry

Estimator = Callable[..., tuple[Tensor, Tensor]]

ADVANTAGE: Registry[Estimator] = Registry("advantage estimator", "algorithm.adv_estimator")

# Keeps the division finite for a group whose rewards are (nearly) all equal; verl's value.
STD_EPS = 1e-6


@ADVANTAGE.register("grpo")
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, index: Tensor, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage: (r - mean(group)) / (std(group) + 1e-6), the same on every token of a response.

    DeepSeekMath (arXiv 2402.03300), outcome supervision. The standard deviation is the sample one (ddof 1), as in
    verl. With `norm_adv_by_std_in_grpo=False` it is left out: Dr. GRPO (arXiv 2503.20783). A group of one gets 0
    (verl: its raw reward).
    """
    rewards = token_level_rewards.sum(-1)
    mean, size, group = _group_mean(rewards, index)
    centred = rewards - mean[group]
    if config["norm_adv_by_std_in_grpo"]:
        variance = torch.zeros_like(mean).index_add_(0, group, centred.square()) / (size - 1).clamp_min(1)
        centred = centred / (variance.sqrt()[group] + STD_EPS)
    advantages = centred.unsqueeze(-1) * response_mask
    return advantages, advantages


@ADVANTAGE.register("rloo")
def rloo(
    token_level_rewards: Tensor, response_mask: Tensor, index: Tensor, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Leave-one-out baseline: r - mean(the group's other rewards), the same on every token of a response.

    RLOO (arXiv 2402.14740). A group of one gets 0 (verl: its raw reward).
    """
    rewards = token_level_rewards.sum(-1)
    mean, size, group = _group_mean(rewards, index)
    leave_one_out = size / (size - 1).clamp_min(1)
    advantages = ((rewards - mean[group]) * leave_one_out[group]).unsqueeze(-1) * response_mask
    return advantages, advantages


def compute_advantage(
    name: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any] | np.ndarray | Tensor | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns by the estimator called `name`.

    Args:
        name: a registered estimator, or `pkg.module:function`.
        token_level_rewards: (N, T) float32; an outcome reward sits on the last response token.
        response_mask: (N, T), 1 on the tokens that train.
        index: group of each sequence, N hashable entries (`uid`).
        config: verl's option names; `norm_adv_by_std_in_grpo` is true unless given.

    Returns:
        (advantages, returns), each (N, T) float32, 0 off the mask.

    Raises:
        BatchError: shapes disagree, or the estimator needs groups and `index` is missing.
        ConfigError: no such estimator.
    """
    estimator = ADVANTAGE.get(name)
    if token_level_rewards.shape != response_mask.shape:
        shapes = f"{tuple(token_level_rewards.shape)} and response_mask {tuple(response_mask.shape)}"
        raise BatchError(f"token_level_rewards {shapes} differ")
    if index is None:
        raise BatchError(
            f"advantage estimator {name!r} compares responses to one prompt and needs `index` (the uid column)"
        )
    if len(index) != len(token_level_rewards):
        raise BatchError(f"index has {len(index)} entries for {len(token_level_rewards)} sequences")
    group = group_ids(index).to(token_level_rewards.device)
    options = {"norm_adv_by_std_in_grpo": True, **(config or {})}
    return estimator(token_level_rewards, response_mask.to(token_level_rewards.dtype), group, options)


def group_ids(index: Sequence[Any] | np.ndarray | Tensor) -> Tensor:
    """Any N labels -> (N,) int64 ids 0..G-1; equal labels get equal ids."""
    if isinstance(index, Tensor):
        return torch.unique(index, return_inverse=True)[1]
    _, ids = np.unique(np.asarray([str(label) for label in index]), return_inverse=True)
    return torch.from_numpy(ids.astype(np.int64).reshape(-1))


def _group_mean(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (G,) and size (G,) of each group, and `group` itself."""
    num_groups = int(group.max()) + 1 if len(group) else 0
    size = torch.bincount(group, minlength=num_groups).to(rewards.dtype)
    mean = torch.zeros(num_groups, dtype=rewards.dtype, device=rewards.device).index_add_(0, group, rewards) / size
    return mean, size, group
