"""Outcome advantages: one number per response, from its score and its group's, the same on every token.

A group of one and a group of equal scores get 0 (verl gives a group of one its raw score).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.advantage.groups import STD_EPS
from grpo_dist.algorithms.advantage.inputs import ADVANTAGE, AdvantageInputs


@ADVANTAGE.register("grpo", needs=("groups",))
def grpo(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Group-relative advantage: (s - mean(group)) / (std(group) + 1e-6).

    DeepSeekMath (arXiv 2402.03300), outcome supervision. The standard deviation is the sample one (ddof 1), as in
    verl. With `norm_adv_by_std_in_grpo=False` it is left out: Dr. GRPO (arXiv 2503.20783).
    """
    normalised = batch.groups.normalise(batch.scores, by_std=config["norm_adv_by_std_in_grpo"])
    return _same(batch.on_tokens(normalised))


@ADVANTAGE.register("grpo_passk", needs=("groups",))
def grpo_passk(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Pass@k: only the best response of a group counts, by its lead: (s_max - s_second) / (std(group) + 1e-6).

    arXiv 2503.19595; as verl's. Without `norm_adv_by_std_in_grpo` the lead itself. Two best ones: 0.
    """
    groups, scores = batch.groups, batch.scores
    rank = groups.rank(scores)
    best, second = (groups.sum(scores.where(rank == place, 0.0)) for place in (0, 1))
    lead = (best - second).where((rank == 0) & (groups.sizes > 1), 0.0)
    if config["norm_adv_by_std_in_grpo"]:
        lead = lead / (groups.std(scores) + STD_EPS)
    return _same(batch.on_tokens(lead))


@ADVANTAGE.register("rloo", needs=("groups",))
def rloo(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Leave-one-out baseline: s - mean(the group's other scores). RLOO (arXiv 2402.14740)."""
    groups, scores = batch.groups, batch.scores
    leave_one_out = groups.sizes / (groups.sizes - 1).clamp_min(1)
    return _same(batch.on_tokens((scores - groups.mean(scores)) * leave_one_out))


@ADVANTAGE.register("opo", needs=("groups",))
def opo(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Length-weighted baseline, which minimises the gradient's variance: s - sum(length * s) / sum(length).

    OPO (arXiv 2505.23585).
    """
    groups, scores, lengths = batch.groups, batch.scores, batch.response_mask.sum(-1)
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp_min(1)
    return _same(batch.on_tokens((scores - baseline).where(groups.sizes > 1, 0.0)))


@ADVANTAGE.register("gpg", needs=("groups",))
def gpg(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Alpha * (s - mean(group)) / f_norm, with alpha = N / number of non-zero scores in the batch.

    GPG (arXiv 2504.02546); alpha makes up for groups that teach nothing. As verl's; meant for policy loss `gpg`.
    """
    scores = batch.scores
    alpha = len(scores) / torch.count_nonzero(scores).clamp_min(1)
    return _same(batch.on_tokens(alpha * batch.groups.normalise(scores, by_std=False) / config["f_norm"]))


def _same(advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Without a value function the return is the advantage."""
    return advantages, advantages
