"""Advantages from the rewards that follow a token: of the batch, less a baseline, or of steps within the group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.advantage.inputs import ADVANTAGE, AdvantageInputs, Groups
from grpo_dist.algorithms.advantage.outcome import grpo
from grpo_dist.algorithms.aggregate import discounted_returns, masked_whiten


@ADVANTAGE.register("reinforce_plus_plus")
def reinforce_plus_plus(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Discounted return to go, whitened over the tokens of the batch. REINFORCE++ (arXiv 2501.03262)."""
    returns = discounted_returns(batch.token_level_rewards, batch.response_mask, config["gamma"])
    return masked_whiten(returns, batch.response_mask), returns


@ADVANTAGE.register("reinforce_plus_plus_baseline", needs=("groups",))
def reinforce_plus_plus_baseline(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """S - mean(group), whitened over the tokens of the batch. REINFORCE++-baseline (arXiv 2501.03262).

    A group of one has itself as baseline (verl: none).
    """
    centred = batch.on_tokens(batch.groups.normalise(batch.scores, by_std=False))
    whitened = masked_whiten(centred, batch.response_mask)
    return whitened, whitened


@ADVANTAGE.register("remax", needs=("reward_baselines",))
def remax(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return to go less the score of the greedy response to the same prompt. ReMax (arXiv 2310.10505).

    `reward_baselines` is (N,): each response's greedy score.
    """
    baselines = batch.need("reward_baselines", "reward_baselines", "subtracts the greedy response's score")
    returns = discounted_returns(batch.token_level_rewards, batch.response_mask, 1.0)
    return returns - batch.on_tokens(torch.as_tensor(baselines, device=returns.device)), returns


@ADVANTAGE.register("distill")
def distill(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Discounted return to go, as it is: of the KL penalty alone, since scores do not train. arXiv 2306.08543.

    With gamma 0 a token answers for its own distance to the teacher, as the loss `k2` has it; with 1 for all that
    follow it too, which is the gradient of the KL between whole responses.
    """
    returns = discounted_returns(batch.token_level_rewards, batch.response_mask, config["gamma"])
    return returns, returns


@ADVANTAGE.register("gae", needs=("values",))
def gae(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, whitened over the tokens of the batch. arXiv 1506.02438.

    A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t; returns, which a critic is trained to
    foresee, are A + V before whitening. V is 0 behind the last token. `values` is (N, T). Tokens off the mask (a tool's
    words) pass value and advantage on unchanged, and what a critic says there has no say; a reward there, such as the
    score on a last token that was rejected, belongs to what follows the trained token before it (verl: lost).
    """
    values = batch.need("values", "values", "needs the values of states").float()
    gamma, lam = config["gamma"], config["lam"]
    rewards, mask = batch.token_level_rewards, batch.response_mask
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[-1])):
        trains = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(trains, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(trains, values[:, t], next_value + rewards[:, t])
        advantages[:, t] = next_advantage
    returns = (advantages + values).where(mask > 0, 0.0)  # no product: 0 * inf is nan
    return masked_whiten(advantages, mask), returns


@ADVANTAGE.register("optimal_token_baseline", needs=("groups", "gradient_norms"))
def optimal_token_baseline(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """G_t - sum_i G_t W_t / sum_i W_t over the responses of the group that have a t-th token that trains.

    The optimal token baseline (arXiv 2602.07078): G_t is the return to go, W_t the sum up to t of 1 - 2 p + sum p^2,
    the squared norm of the log-prob's gradient by the logits, which tells how much a response's gradient varies. With
    importance weights that norm is the weighted gradient's. Tokens are counted among those that train; where only one
    response is left the baseline is its own return, and so is a group of one's (verl: 0 there).
    """
    norms = batch.need("gradient_norms", "gradient_norms", "weighs by the gradients of the policy before the update")
    trains = batch.response_mask > 0
    returns = discounted_returns(batch.token_level_rewards, batch.response_mask, 1.0)
    energies = norms.double().clamp_min(0).where(trains, 0.0).cumsum(-1)[trains]
    place = (batch.groups.ids[:, None] * trains.shape[1] + trains.cumsum(-1) - 1)[trains]
    total, weighted = torch.zeros(2, batch.groups.count * trains.shape[1], dtype=torch.float64, device=norms.device)
    total.index_add_(0, place, energies)
    weighted.index_add_(0, place, energies * returns[trains])
    advantages = torch.zeros_like(returns)
    # where no gradient is left, any baseline is as good
    advantages[trains] = (returns[trains] - (weighted / total).nan_to_num(0.0)[place]).float()
    return advantages, returns


@ADVANTAGE.register("gigpo", needs=("groups", "turn_states", "turn_rewards"))
def gigpo(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """As grpo, plus `step_advantage_w` times the turn's return against those of turns from the same state.

    GiGPO (arXiv 2505.10978): a turn's return is the sum of gamma^k times the rewards of the turns that follow it in the
    row, whichever branch they are in, and it is normalised, as the scores are, over the turns of the group's responses
    before which the environment had said the same (`targets.turn_states`); one without another has 0. A reward behind a
    turn is that turn's.
    """
    states = batch.need("turn_states", "turn_states", "compares turns from the same state").long()
    first = (states < 0) | ((states > 0) & (torch.nn.functional.pad(states, (1, 0))[:, :-1] == 0))
    rows, places = first.nonzero(as_tuple=True)
    advantages, _ = grpo(batch, config)
    if not len(rows):
        return advantages, advantages
    turn = (first.cumsum(-1) - 1).clamp_min(0)  # of each token
    returns = torch.zeros(len(first), int(turn.max()) + 2, dtype=torch.float64, device=states.device)
    returns.scatter_add_(1, turn, batch.token_level_rewards.double())
    for k in reversed(range(returns.shape[1] - 1)):
        returns[:, k] += config["gamma"] * returns[:, k + 1]
    pairs = torch.stack([batch.groups.ids[rows], states[rows, places].abs()])
    _, ids = pairs.unique(dim=1, return_inverse=True)
    steps = Groups(ids, int(ids.max()) + 1)
    of_turn, number = torch.zeros_like(returns), turn[rows, places]
    of_turn[rows, number] = steps.normalise(returns[rows, number], by_std=config["norm_adv_by_std_in_grpo"])
    advantages = advantages + config["step_advantage_w"] * of_turn.gather(1, turn).float() * batch.response_mask
    return advantages, advantages


@ADVANTAGE.register("grpo_process", needs=("groups", "step_mask"))
def grpo_process(batch: AdvantageInputs, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A token's advantage is the sum of the normalised rewards of the steps that end at or after it.

    DeepSeekMath (arXiv 2402.03300), section 4.1.3: the rewards of all steps of all responses of a group are
    normalised together, r' = (r - mean) / (std + 1e-6), and A_t = sum of r' over steps that end at or after t.
    `step_mask` (N, T) is 1 on the last token of each step. A step's reward is the sum of the `token_level_rewards` of
    its tokens: its own score, and what else lies on them, such as a KL penalty; what lies behind the last step's end,
    such as an overlong penalty on the end-of-sequence token, belongs to the last step. A response without a step's end
    is one step. The standard deviation is the sample one and is left out without `norm_adv_by_std_in_grpo`. With one
    step per response this is `grpo`.
    """
    ends = batch.need("step_mask", "step_mask", "rewards every step and needs to know where they end").bool()
    ends = ends | (_last_trained(batch.response_mask) & ~ends.any(-1, keepdim=True))
    response = ends.nonzero()[:, 0]
    steps = Groups(batch.groups.ids[response], batch.groups.count)
    normalised = steps.normalise(
        _step_rewards(batch.token_level_rewards, ends), by_std=config["norm_adv_by_std_in_grpo"]
    )
    at_ends = torch.zeros_like(batch.token_level_rewards, dtype=torch.float64)
    at_ends[ends] = normalised.where(batch.groups.sizes[response] > 1, 0.0)
    advantages = at_ends.flip(-1).cumsum(-1).flip(-1).float() * batch.response_mask
    return advantages, advantages


def _step_rewards(rewards: Tensor, ends: Tensor) -> Tensor:
    """(S,) float64: the summed rewards of the tokens of each step, for the S ends in the order of `ends.nonzero()`."""
    count = ends.sum(-1, keepdim=True)  # at least 1
    within = torch.minimum(ends.cumsum(-1) - ends.long(), count - 1)  # behind the last end: the last step
    step = within + count.cumsum(0) - count
    total = torch.zeros(int(count.sum()), dtype=torch.float64, device=rewards.device)
    return total.index_add_(0, step.flatten(), rewards.double().flatten())


def _last_trained(mask: Tensor) -> Tensor:
    """(N, T) bool: the last token of each response that trains; of a response without one, the last of the row."""
    trains = (mask > 0) | ~(mask > 0).any(-1, keepdim=True)
    return trains & (trains.flip(-1).cumsum(-1).flip(-1) == 1)
