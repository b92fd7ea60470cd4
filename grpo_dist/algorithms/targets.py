"""From scores and log-probs to what the update trains on. Everything here sees the whole batch at once.

response_mask        less truncated responses (`mask_truncated`), groups whose scores teach nothing
                     (`mask_equal_groups`), rejected responses (`rollout_correction`) and those without a score, with
                     which no other is compared
token_level_rewards  = scores - kl_coef * KL(policy || reference), token by token (`kl_penalty`); distill: no scores
advantages, returns  by the estimator; advantages are 0 on tokens of low entropy (`top_entropy_quantile`)
rollout_is_weights   importance weights against the sampler (`rollout_correction`); 0 where the second moment of the
                     log-ratios is too large (`m2_threshold`)
selected_tokens      what clip_cov and kl_cov treat apart
observation_mask     1 on tokens that answer a turn of the policy, for observation_coeff
prompt_weights       1 / tokens of the prompt's responses, for loss_agg_mode prompt-mean
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.advantage import Groups, compute_advantage
from grpo_dist.algorithms.advantage.inputs import mean_scores
from grpo_dist.algorithms.aggregate import masked_mean
from grpo_dist.algorithms.controllers import SCORES, score_metrics
from grpo_dist.algorithms.correction import compute_rollout_correction, second_moment_mask
from grpo_dist.algorithms.kl import kl_penalty
from grpo_dist.algorithms.policy_loss import token_selection
from grpo_dist.algorithms.settings import GRADIENT_NORMS, TargetSettings
from grpo_dist.plugins.names import SCORELESS_ADV_ESTIMATORS

# Keeps the explained variance finite where all returns are equal; verl's value.
EXPLAINED_EPS = 1e-5
# An advantage of less than this share of a response's scores is rounding: means are taken in float64.
ROUNDING = 1e-12


def compute_targets(
    columns: Mapping[str, Tensor],
    settings: TargetSettings,
    *,
    index: Any,
    truncated: Tensor,
    scored: Tensor | None = None,
    kl_coef: float = 0.0,
    sources: Tensor | None = None,
    reward_baselines: Tensor | None = None,
    reward_components: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Prepare a batch of N responses of up to T tokens.

    A response without a score is left out before anything is computed, as if it had not been sampled: it is in no
    mean, deviation or rank of its group and in no statistic of the batch. Its row comes back with mask and advantage 0.
    Where scores do not train (distill) it is treated like the others.

    Args:
        columns: (N, T) tensors: `settings.columns`. Without `predecessors` there are no branches.
        index: (N,) group of each response.
        truncated: (N,), 1 where the response was cut short.
        scored: (N,) bool, whether the response has a score; None: all have one.
        sources: (N,) numbers of data sources below 2^31; None: all are one.
        reward_baselines: (N,) scores of the greedy responses, for estimators that need them; nan counts as no score.
        reward_components: (N,) scores by name, nan where a response has none; the same.

    Returns:
        ((N, T) tensors by name as above, with `old_log_probs` where they are the sampler's; metrics).
    """
    whole: dict[str, Any] = {"kl_coef": kl_coef, "generator": generator}
    rows: dict[str, Any] = {"truncated": truncated, "sources": sources, "reward_baselines": reward_baselines}
    if scored is not None and reward_baselines is not None:
        scored = scored & ~reward_baselines.isnan()
    if scored is None or bool(scored.all()) or settings.adv_estimator in SCORELESS_ADV_ESTIMATORS:
        return _targets(columns, settings, index=index, reward_components=reward_components, **rows, **whole)
    scored_rows = scored.nonzero()[:, 0]
    # without any score nothing can be left out: all are taken, without a token that trains
    taken = scored_rows if len(scored_rows) else torch.arange(len(scored))
    part = {name: values[taken] for name, values in columns.items()}
    if not len(scored_rows):
        part |= {name: torch.zeros_like(part[name]) for name in ("token_level_scores", "response_mask")}
    whole |= {name: None if values is None else values[taken].nan_to_num() for name, values in rows.items()}
    of_taken = [index[row] for row in taken.tolist()]
    components = {name: values[taken] for name, values in (reward_components or {}).items()}
    out, metrics = _targets(part, settings, index=of_taken, reward_components=components, **whole)
    if not len(scored_rows):
        metrics = {name: value for name, value in metrics.items() if not name.startswith(SCORES)}
    zeros = torch.zeros(columns["response_mask"].shape)
    back = {name: columns["token_level_scores"].float() if name == "token_level_rewards" else zeros for name in out}
    return {name: back[name].index_copy(0, scored_rows, out[name][: len(scored_rows)].float()) for name in out}, metrics


def _targets(
    columns: Mapping[str, Tensor],
    settings: TargetSettings,
    *,
    index: Any,
    truncated: Tensor,
    kl_coef: float,
    generator: torch.Generator | None,
    **compared: Any,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """`compute_targets` of responses that all have a score; `compared` is what estimators read, row by row."""
    rollout = columns["rollout_log_probs"]
    from_actor = settings.old_log_probs_from == "actor"
    old = columns["old_log_probs"] if from_actor else rollout
    mask, rewards = columns["response_mask"].float(), columns["token_level_scores"].float()
    estimate = _estimator(columns, settings, index=index, **compared)
    if settings.mask_truncated:
        mask = mask * (1 - truncated.float()).unsqueeze(-1)
    if settings.mask_equal_groups:
        plain = estimate(token_level_rewards=rewards, response_mask=mask, gradient_norms=columns.get(GRADIENT_NORMS))
        mask = mask * _teaches(plain[0], rewards, index)
    weights: Tensor | None = None
    metrics: dict[str, float] = {}
    if from_actor:
        weights, mask, metrics = compute_rollout_correction(
            old_log_probs=old, rollout_log_probs=rollout, response_mask=mask, **settings.rollout_correction
        )
    if settings.adv_estimator in SCORELESS_ADV_ESTIMATORS:
        rewards = torch.zeros_like(rewards)
    if settings.kl_penalty is not None:
        kl = kl_penalty(settings.kl_penalty, old, columns["ref_log_probs"], key="algorithm.kl_penalty")
        rewards = rewards - kl_coef * kl.where(mask > 0, 0.0)
        metrics |= _mean_of_responses("actor/reward_kl_penalty", kl, mask)
        metrics["actor/reward_kl_penalty_coeff"] = kl_coef
    norms = columns.get(GRADIENT_NORMS)
    weighted = norms if norms is None or weights is None else norms * weights.square()
    advantages, returns = estimate(token_level_rewards=rewards, response_mask=mask, gradient_norms=weighted)
    if "agent_baselines" in settings.needs:
        metrics |= score_metrics(mean_scores(rewards, columns.get("agent_ids"), compared["sources"]))
    if settings.top_entropy_quantile < 1:
        advantages = advantages * high_entropy(columns["old_entropies"], mask, settings.top_entropy_quantile)
    if settings.m2_threshold is not None:
        kept = second_moment_mask(old, rollout, advantages, mask, settings.m2_threshold)
        weights = kept if weights is None else weights * kept
        metrics["rollout_corr/m2_masked_fraction"] = float(masked_mean(1 - kept, mask))
    metrics |= _spread("critic/advantages", advantages, mask) | _spread("critic/returns", returns, mask)
    if settings.has_values:
        metrics |= _critic_metrics(columns["values"], returns, mask)
    read = {"log_probs": old, "advantages": advantages, "response_mask": mask}
    selected = token_selection(settings.loss_mode, **read, config=settings.loss_options, generator=generator)
    out = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns, "response_mask": mask}
    optional = {
        "old_log_probs": old if settings.old_log_probs_from == "rollout" else None,
        "rollout_is_weights": weights,
        "selected_tokens": None if selected is None else selected.float(),
        "observation_mask": answers(columns["response_mask"], columns.get("predecessors"))
        if settings.observations
        else None,
        "prompt_weights": _prompt_weights(mask, index) if settings.by_prompt else None,
    }
    return out | {name: value for name, value in optional.items() if value is not None}, metrics


def _estimator(
    columns: Mapping[str, Tensor], settings: TargetSettings, **compared: Any
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the estimator of these rows; what is missing are its rewards, mask and gradient norms."""
    needs, sampled = settings.needs, columns["response_mask"]
    values = columns["values"].float() if settings.has_values else torch.zeros(sampled.shape)
    if "turn_states" in needs:
        compared["turn_states"] = turn_states(columns["responses"].long(), sampled, columns.get("predecessors"))
    return functools.partial(
        compute_advantage,
        settings.adv_estimator,
        agent_ids=columns.get("agent_ids"),
        values=values if settings.has_values or "values" in needs else None,
        entropies=columns["old_entropies"] if "entropies" in needs else None,
        step_mask=columns.get("step_mask"),
        config={**settings.options, "sources": compared.pop("sources")},
        **compared,
    )


def _teaches(advantages: Tensor, scores: Tensor, index: Any) -> Tensor:
    """(N, 1): 1 on the responses of groups in which a token has an advantage."""
    told = (advantages.abs() > ROUNDING * scores.abs().sum(-1, keepdim=True)).any(-1)
    return (Groups.of(index).to(told.device).sum(told) > 0).float()[:, None]


def _prompt_weights(mask: Tensor, index: Any) -> Tensor:
    """(N, T): 1 / number of trained tokens of all responses to the token's prompt; 0 off the mask."""
    tokens = Groups.of(index).to(mask.device).sum(mask.sum(-1))
    return mask / tokens.clamp_min(1).float()[:, None]


def _spread(name: str, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, largest and smallest of the tokens that train, as verl's; nothing where none does."""
    chosen = values[mask > 0]
    numbers = {"mean": chosen.mean(), "max": chosen.max(), "min": chosen.min()} if len(chosen) else {}
    return {f"{name}/{what}": float(number) for what, number in numbers.items()}


def _critic_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Return verl's metrics of a critic's values on trained tokens, with 1 - var(returns - values) / var(returns).

    Explained variance: 1 if every return is foreseen, 0 if a constant would do as well, less if it would do better.
    """
    trains = mask > 0
    metrics = _spread("critic/values", values, mask)
    if trains.sum() > 1:
        error, spread = (returns - values)[trains].double().var(), returns[trains].double().var()
        metrics["critic/vf_explained_var"] = float(1 - error / (spread + EXPLAINED_EPS))
    return metrics


def _mean_of_responses(name: str, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean over the responses of the mean over their tokens that train; nothing where none does."""
    tokens = mask.sum(-1)
    means = values.where(mask > 0, 0.0).sum(-1)[tokens > 0] / tokens[tokens > 0]
    return {name: float(means.mean())} if len(means) else {}


def high_entropy(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """(N, T): 1 on the `share` of the masked tokens with the highest entropy. arXiv 2506.01939.

    The loss still counts all tokens: as in the paper and TRL's `top_entropy_quantile`, the others add zeros.
    """
    values = entropies[mask > 0]
    if not len(values):
        return mask
    threshold = values.sort(descending=True).values[max(1, round(len(values) * share)) - 1]
    return ((entropies >= threshold) & (mask > 0)).float()


# --- turns of an episode --------------------------------------------------------------------------------------------
# `sampled`, (N, T), is 1 on tokens that the policy has sampled. `predecessors`, (N, T), says which token each one
# follows in a row with branches (protocol/sequences.py), -1 on padding; None: each follows the one right before.
def turn_states(responses: Tensor, sampled: Tensor, predecessors: Tensor | None = None) -> Tensor:
    """Number what an agent has been told before each of its turns, as gigpo compares them.

    A turn is a run of sampled tokens of which each follows the one right before, up to where something else was sampled
    too. What was put in before it is looked for on its own path, up to the turn before or into the prompt, no further.

    Args:
        responses: (N, T) int64 token ids.

    Returns:
        (N, T) int64, equal on turns before which the same tokens were put in, 0 off the turns; negative on the first
        token of a turn that stands right behind another one.
    """
    states, known, tokens = torch.zeros_like(responses), dict[tuple[int, bytes], int](), responses.cpu().numpy()
    for row, is_sampled, follows, run in _turn_rows(sampled, predecessors):
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
    for row, is_sampled, follows, run in _turn_rows(sampled, predecessors):
        put_in, before = ~is_sampled & (follows[run] >= 0), np.maximum(follows[run], 0)
        goes_on = np.append(is_sampled[1:] & (follows[1:] == np.arange(len(follows) - 1)), False)
        answer = put_in & (is_sampled & ~goes_on)[before]
        while (more := answer | (put_in & answer[before])).sum() > answer.sum():
            answer = more
        out[row] = torch.from_numpy(answer)
    return out


def _turn_rows(
    sampled: Tensor, predecessors: Tensor | None
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
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
