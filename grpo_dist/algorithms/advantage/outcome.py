"""Outcome advantages: one number per response, from its score and its group's, the same on every token.

A group of one and a group of equal scores get 0 (verl gives a group of one its raw score). `gdpo` compares each
component of a reward with its group on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.advantage.inputs import ADVANTAGE, STD_EPS, AdvantageInputs, Groups
from grpo_dist.errors import ConfigError


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


@ADVANTAGE.register("maxrl", needs=("groups",))
def maxrl(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(s - mean(group)) / mean(group), and 0 where that mean is not above 0.

    MaxRL (arXiv 2602.02710): for scores of 0 and 1 the gradient is an estimate of that of log(success rate), so rare
    successes weigh more than with grpo. Meant for scores that are not negative.
    """
    groups, scores = batch.groups, batch.scores
    mean = groups.mean(scores)
    return _same(batch.on_tokens(((scores - mean) / mean).where(mean > 0, 0.0)))


@ADVANTAGE.register("lite_ppo", needs=("groups",))
def lite_ppo(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(s - mean(group)) / (std(all scores of the batch) + 1e-6), sample standard deviation.

    Lite PPO (arXiv 2508.08221): a group of nearly equal scores is not blown up by its own small deviation.
    """
    centred = batch.groups.normalise(batch.scores, by_std=False)
    return _same(batch.on_tokens(centred / (_std(batch.scores) + STD_EPS)))


@ADVANTAGE.register("scale_rl", needs=("groups",))
def scale_rl(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(s - mean(group)) / (std of these differences over the batch + 1e-6), sample standard deviation.

    ScaleRL (arXiv 2510.13786), "batch-level" normalisation; unlike lite_ppo it is not made smaller by the spread
    between easy and hard prompts. Responses without a token that trains do not count in the deviation, so that the
    paper's filter of groups with equal scores is `mask_equal_groups`.
    """
    centred = batch.groups.normalise(batch.scores, by_std=False)
    return _same(batch.on_tokens(centred / (_std(centred[batch.response_mask.any(-1)]) + STD_EPS)))


def _std(values: Tensor) -> Tensor:
    """Sample standard deviation of (N,) float64; 0 of one number."""
    return values.std() if len(values) > 1 else values.new_zeros(())


@ADVANTAGE.register("rl_zvp", needs=("groups", "entropies"))
def rl_zvp(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """As grpo; in a group of equal scores alpha H_t on a right response, -alpha (max_t H - H_t) on a wrong one.

    RL-ZVP (arXiv 2509.21880): groups without spread teach by the entropies H_t of the policy before the update. A
    response is right if its score is above 0; alpha = `zvp_alpha`, 0.1 in the paper. A group of one gets 0.
    """
    advantages, _ = grpo(batch, config)
    groups, scores, trains = batch.groups, batch.scores, batch.response_mask > 0
    entropies = batch.need("entropies", "entropies", "needs the entropies of the policy before the update")
    entropies = entropies.float().where(trains, 0.0)
    shaped = entropies.where(scores[:, None] > 0, entropies - entropies.amax(-1, keepdim=True))
    equal = (groups.std(scores) == 0) & (groups.sizes > 1)
    return _same(advantages.where(~equal[:, None], config["zvp_alpha"] * shaped * batch.response_mask))


@ADVANTAGE.register("a2po", needs=("groups",))
def a2po(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Score - V, V = beta log(mean(exp(score / beta)) of the group), beta = `a2po_beta`.

    A*-PO (arXiv 2505.20686) minimises (b log(pi / pi_ref) - (r - V))^2 for whole responses. On policy its gradient is
    2 b times the policy gradient of the reward r - b log(pi / pi_ref), less V: with use_kl_in_reward, kl_penalty=k1 and
    kl_coef = b, summed over tokens. The paper estimates V = beta log E_ref[exp(r / beta)] once, from samples of the
    reference; here the group's penalised scores do, which for beta = b is the same mean by importance sampling.
    """
    groups, scores, beta = batch.groups, batch.scores, config["a2po_beta"]
    best = groups.sum(scores.where(groups.rank(scores) == 0, 0.0))  # so that no exponential overflows
    value = best + beta * groups.mean(((scores - best) / beta).exp()).log()
    return _same(batch.on_tokens(scores - value))


@ADVANTAGE.register("rae", needs=("agent_baselines",))
def rae(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Score - b(agent), where b is a moving average of the agent's scores in earlier steps (`AgentBaselines`).

    Role-conditioned advantage estimation, SPIRAL (arXiv 2506.24119): in games that one agent wins and the other loses
    a group's mean says nothing. As in the paper an agent has one b for each game, which is the data source.
    `agent_baselines` has b by `baseline_keys`, of `sources`, (N,) numbers of the responses' data sources; those
    that are not there are 0. Agents are sequences of their own with `agent_ids`.
    """
    known = config.get("agent_baselines", {})
    baselines = [known.get(key, 0.0) for key in batch.optional["baseline_keys"].tolist()]
    return _same(batch.on_tokens(batch.scores - torch.tensor(baselines, device=batch.response_mask.device)))


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
    """
    components = batch.need("reward_components", "reward_components", "normalises each reward component on its own")
    chosen = config.get("gdpo_reward_keys")
    keys = list(components if chosen is None else chosen)
    missing = [key for key in keys if key not in components]
    if missing:
        names = ", ".join(components) or "none"
        raise ConfigError(f"algorithm.gdpo_reward_keys: no response has the component {missing[0]}; there are: {names}")
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

    Both are (N,) float64. The second, the size before the mean was taken away, is what rounding is measured by.
    """
    known = ~scores.isnan()
    values, members = scores[known], Groups(groups.ids[known], groups.count)
    std, magnitude = members.std(values), members.mean(values.abs())
    scale = (1 / std).where(std > ROUNDING * magnitude, 0.0)
    normalised, size = torch.zeros_like(scores), torch.zeros_like(scores)
    normalised[known], size[known] = (values - members.mean(values)) * scale, magnitude * scale
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
