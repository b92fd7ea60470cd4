"""A reward of several components: each is compared with its group on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.advantage.groups import Groups
from grpo_dist.algorithms.advantage.inputs import ADVANTAGE, AdvantageInputs
from grpo_dist.errors import ConfigError

# Rewards are float32, whose rounding is 6e-8 of their size: a spread of less than this share of it is no difference.
ROUNDING = 1e-6


@ADVANTAGE.register("gdpo", needs=("groups", "reward_components"))
def gdpo(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Each reward component is normalised in its group on its own; their weighted sum is whitened over the batch.

    GDPO (arXiv 2601.05242): components of different scales keep their say. `reward_components` maps names to (N,)
    scores; `gdpo_reward_keys` picks some of them (all), `gdpo_reward_weights` weighs them in that order (1). Where a
    score is nan the component does not apply to the response: it is left out of the group's statistics and adds 0.

    Deviations that are only rounding count as 0, those of a component in its group and that of the sum; the others
    are divided by as they are. (verl adds 1e-6 to each and 1e-8 to the variance, so that components which cancel leave
    a rest that whitening enlarges.)

    Raises:
        ConfigError: no response has one of the components, or there are not as many weights.
    """
    components = batch.need("reward_components", "reward_components", "normalises each reward component on its own")
    chosen = config.get("gdpo_reward_keys")
    keys = list(components if chosen is None else chosen)
    missing = [key for key in keys if key not in components]
    if missing:
        found = ", ".join(components) or "none"
        raise ConfigError(f"algorithm.gdpo_reward_keys: no response has the component {missing[0]}; there are: {found}")
    weights = list(config.get("gdpo_reward_weights") or [1.0] * len(keys))
    if len(weights) != len(keys):
        raise ConfigError(f"algorithm.gdpo_reward_weights: {len(weights)} weights for {len(keys)} reward components")
    total, size = torch.zeros_like(batch.scores), torch.zeros_like(batch.scores)
    for key, weight in zip(keys, weights, strict=True):
        scores = torch.as_tensor(components[key], device=total.device).double()
        normalised, its_size = _normalise(batch.groups, scores)
        total += weight * normalised
        size += abs(weight) * its_size
    advantages = batch.on_tokens(_whiten(total, size, batch.response_mask.double().sum(-1)))
    return advantages, advantages


def _normalise(groups: Groups, scores: Tensor) -> tuple[Tensor, Tensor]:
    """(value - mean) / std within each group of the scores that are there, and mean(|value|) / std; 0 elsewhere.

    Both are (N,) float64. The second is how large the scores were before the mean was taken away: what rounding is
    measured by.
    """
    there = ~scores.isnan()
    values, members = scores[there], Groups(groups.ids[there], groups.count)
    std, magnitude = members.std(values), members.mean(values.abs())
    scale = (1 / std).where(std > ROUNDING * magnitude, 0.0)
    normalised, size = torch.zeros_like(scores), torch.zeros_like(scores)
    normalised[there], size[there] = (values - members.mean(values)) * scale, magnitude * scale
    return normalised, size


def _whiten(total: Tensor, size: Tensor, lengths: Tensor) -> Tensor:
    """(total - mean) / std over the tokens of the batch, sample variance; all 0 where the spread is rounding.

    All are (N,) float64: a response's value counts once for each of its `lengths` tokens, and `size` is how large the
    numbers were that were added up to it.
    """
    count = lengths.sum().clamp_min(1)
    centred = total - (lengths * total).sum() / count
    std = ((lengths * centred.square()).sum() / (count - 1).clamp_min(1)).sqrt()
    if std <= ROUNDING * (lengths * size).sum() / count:
        return torch.zeros_like(total)
    return centred / std
