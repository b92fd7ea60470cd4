"""Policy losses: from log-probs and advantages to a loss. Call them through `compute_policy_loss`.

Every one has one signature,

    loss(batch: PolicyInputs, config: Mapping[str, Any]) -> (token_loss, metrics)

with `config` a mapping of verl's option names, token_loss (N, T) float32, still to be aggregated, importance weights
already applied, and metrics as means over the masked tokens of this call.

    the ratio is bounded              vanilla (PPO, clip-higher, dual clip), gspo, geo_mean, cispo, sapo
    it is not                         gpg, dro, dppo_tv, dppo_kl
    it weighs the whole response      topr, vespo
    a few tokens are treated apart    clip_cov, kl_cov
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms import aggregate
from grpo_dist.algorithms.aggregate import MAX_LOG_RATIO, binary_kl, bounded_log_ratio, masked_mean, tensor_fault
from grpo_dist.algorithms.settings import ObjectiveSettings
from grpo_dist.plugins.names import TOKEN_SELECTING_LOSSES
from grpo_dist.plugins.registry import Fault, Registry, described


def policy_loss_fault(returned: Any, batch: Any, config: Mapping[str, Any]) -> Fault | None:
    """Return what is wrong with a policy loss's results. Where log-probs are not finite, it is not the loss's fault."""
    shape = batch.log_probs.shape
    expected = f"(token losses, metrics), a float tensor of shape {tuple(shape)} and a dict of scalars"
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        return described(returned), expected
    loss, metrics = returned
    finite = all(values.isfinite().all() for values in (batch.log_probs, batch.old_log_probs, batch.advantages))
    if problem := tensor_fault(loss, shape, batch.response_mask if finite else torch.zeros_like(batch.response_mask)):
        return f"token losses = {problem}", f"{expected}, without nan and inf on response_mask"
    if batch.log_probs.requires_grad and not loss.requires_grad:
        return "token losses without a gradient", f"{expected}; compute the losses from batch.log_probs"
    if not isinstance(metrics, Mapping):
        return f"metrics = {described(metrics)}", expected
    for name, value in metrics.items():
        if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
            return f"metrics[{name!r}] = {described(value)}", expected
    return None


POLICY_LOSS: Registry[Callable[..., tuple[Tensor, dict[str, Tensor]]]] = Registry(
    "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode", ("batch", "config"), policy_loss_fault
)


@dataclass(frozen=True)
class PolicyInputs:
    """A batch of N responses of up to T tokens; all tensors (N, T) float32, 0 off the mask (weights: 1).

    Attributes:
        old_log_probs: nats; the policy that is being improved on. No gradient.
        log_probs: nats; the current policy, carries the gradient.
        rollout_is_weights: importance weights against the sampler, or None.
        selected: bool, the tokens that a loss treats apart (`token_selection`), or None: the loss picks them itself.
    """

    old_log_probs: Tensor
    log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_is_weights: Tensor | None = None
    selected: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """log(pi / pi_old), between -20 and 20."""
        return bounded_log_ratio(self.log_probs, self.old_log_probs)

    @property
    def lengths(self) -> Tensor:
        """(N, 1): trained tokens of each response, at least 1."""
        return self.response_mask.sum(-1, keepdim=True).clamp_min(1)

    @property
    def sequence_log_ratio(self) -> Tensor:
        """(N, 1): log(pi(y) / pi_old(y)) of each response, the sum over its trained tokens, between -20 and 20."""
        return (self.log_ratio * self.response_mask).sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """(N, 1): mean over the trained tokens of each response."""
        return (values * self.response_mask).sum(-1, keepdim=True) / self.lengths

    def weighted(self, token_loss: Tensor) -> Tensor:
        """Times the importance weights, if there are any."""
        return token_loss if self.rollout_is_weights is None else token_loss * self.rollout_is_weights

    def share(self, condition: Tensor) -> Tensor:
        """Share of the trained tokens for which `condition` holds."""
        return masked_mean(condition.float(), self.response_mask)

    def metrics(self, clipped: Tensor, clipped_lower: Tensor) -> dict[str, Tensor]:
        """`actor/pg_clipfrac`, `actor/pg_clipfrac_lower` from two conditions, and `actor/ppo_kl`."""
        fractions = {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": clipped_lower}
        return {name: self.share(value) for name, value in fractions.items()} | self.ppo_kl()

    def ppo_kl(self) -> dict[str, Tensor]:
        """`actor/ppo_kl`: mean of old - new log-prob, nats."""
        return {"actor/ppo_kl": masked_mean(-self.log_ratio, self.response_mask)}


def clip_range(config: Mapping[str, Any]) -> tuple[float, float]:
    """clip_ratio_low and clip_ratio_high; clip_ratio where one is not given."""
    low, high = config.get("clip_ratio_low"), config.get("clip_ratio_high")
    return (config["clip_ratio"] if low is None else low), (config["clip_ratio"] if high is None else high)


# --- losses that bound the ratio pi / pi_old -------------------------------------------------------------------------
# A sequence's mean log-ratio above this is clipped whatever its exact value; verl's bound.
MAX_SEQUENCE_LOG_RATIO = 10.0


@POLICY_LOSS.register("vanilla")
def clipped_surrogate(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, with separate ranges (clip-higher) and dual clip.

    loss = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)); for A < 0 also at most -A c.
    PPO (arXiv 1707.06347), clip-higher (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729); as verl's `vanilla`.

    Metrics: `actor/pg_clipfrac` (share of tokens whose ratio is clipped), `actor/pg_clipfrac_lower` (share held by
    the dual clip), `actor/ppo_kl`.
    """
    ratio = batch.log_ratio.exp()
    surrogate, clipped = clip(ratio, batch.advantages, config)
    ceiling = -batch.advantages * config["clip_ratio_c"]
    negative = batch.advantages < 0
    token_loss = torch.where(negative, torch.minimum(surrogate, ceiling), surrogate)
    return batch.weighted(token_loss), batch.metrics(clipped, negative & (surrogate > ceiling))


@POLICY_LOSS.register("gspo")
def gspo(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of the sequence's ratio, exp(mean_t log ratio_t), on each of its tokens.

    GSPO (arXiv 2507.18071). The value is the sequence's, the gradient goes through each token's own log-prob
    (GSPO-token, equal in total). The paper's objective: loss_agg_mode seq-mean-token-mean, clip ranges 3e-4 and 4e-4.
    """
    mean_log_ratio = batch.sequence_mean(batch.log_probs - batch.old_log_probs).detach()
    own = batch.log_probs - batch.log_probs.detach()
    ratio = torch.clamp(mean_log_ratio + own, max=MAX_SEQUENCE_LOG_RATIO).exp()
    token_loss, clipped = clip(ratio, batch.advantages, config)
    return batch.weighted(token_loss), batch.metrics(clipped, torch.zeros_like(clipped))


@POLICY_LOSS.register("geo_mean")
def geo_mean(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A times the geometric mean of the sequence's clipped ratios, on each of its tokens.

    GMPO (arXiv 2507.20673): log-ratios are clipped to [-low, high], one-sidedly like PPO's. The paper's loss_agg_mode
    is seq-mean-token-mean; verl uses that mean whatever the mode. Importance weights enter by their geometric mean.
    """
    low, high = clip_range(config)
    sign = torch.sign(batch.advantages)
    clamped = torch.clamp(batch.log_ratio, -low, high)
    bounded = sign * torch.minimum(sign * batch.log_ratio, sign * clamped)
    token_loss = -batch.sequence_mean(batch.advantages) * batch.sequence_mean(bounded).exp()
    if batch.rollout_is_weights is not None:
        token_loss = token_loss * batch.sequence_mean(torch.log(batch.rollout_is_weights + 1e-10)).exp()
    outside = batch.log_ratio != clamped
    metrics = batch.metrics(outside & (batch.advantages > 0), outside & (batch.advantages < 0))
    return token_loss.expand_as(batch.response_mask), metrics


@POLICY_LOSS.register("cispo")
def cispo(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(ratio)) A log pi: the ratio's weight is clipped, no token's gradient is.

    CISPO (MiniMax-M1, arXiv 2506.13585).
    """
    low, high = clip_range(config)
    ratio = batch.log_ratio.exp().detach()
    weight = torch.clamp(ratio, 1 - low, 1 + high)
    clipped = weight != ratio
    token_loss = -weight * batch.advantages * batch.log_probs
    return batch.weighted(token_loss), batch.metrics(clipped, torch.zeros_like(clipped))


@POLICY_LOSS.register("sapo")
def sapo(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A (4 / tau) sigmoid(tau (ratio - 1)): a soft gate in place of the clip, with one tau for each sign of A.

    SAPO (arXiv 2511.20347), `tau_pos`, `tau_neg`. The paper's objective is loss_agg_mode seq-mean-token-mean.
    """
    tau = torch.where(batch.advantages > 0, config["tau_pos"], config["tau_neg"])
    gate = torch.sigmoid(tau * (batch.log_ratio.exp() - 1)) * (4 / tau)
    none = torch.zeros_like(batch.response_mask)
    return batch.weighted(-gate * batch.advantages), batch.metrics(none, none)


def clip(ratio: Tensor, advantages: Tensor, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The larger of -A ratio and its clipped form, and where the clip decides."""
    low, high = clip_range(config)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


# --- losses without PPO's clip ---------------------------------------------------------------------------------------
@POLICY_LOSS.register("gpg")
def gpg(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi: no ratio, no clip. GPG (arXiv 2504.02546)."""
    return batch.weighted(-batch.advantages * batch.log_probs), batch.ppo_kl()


@POLICY_LOSS.register("dro")
def dro(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-(A log pi - beta / 2 (log pi - log pi_old)^2), beta = `dro_beta`.

    Direct reward optimisation (arXiv 2405.19107), on tokens, as verl's `dro`.
    """
    difference = batch.log_probs - batch.old_log_probs
    token_loss = -(batch.log_probs * batch.advantages - 0.5 * config["dro_beta"] * difference.square())
    return batch.weighted(token_loss), batch.ppo_kl()


@POLICY_LOSS.register("dppo_tv")
def dppo_tv(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient within |p - p_old| <= clip range: tokens that go on out of it are masked.

    DPPO (arXiv 2602.04879) with the binary total variation; the ratio is truncated at `clip_ratio_c`.
    """
    low, high = clip_range(config)
    change = batch.log_probs.exp() - batch.old_log_probs.exp()
    return _trust_region(batch, config, change > high, change < -low)


@POLICY_LOSS.register("dppo_kl")
def dppo_kl(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """As `dppo_tv`, with the KL divergence of the two Bernoulli distributions (this token or not) as the region."""
    low, high = clip_range(config)
    old, new = batch.old_log_probs, batch.log_probs
    kl = binary_kl(old, new)
    # ~(kl <= bound), not kl > bound: a divergence that is not a number is outside
    return _trust_region(batch, config, ~(kl <= high) & ~(new <= old), ~(kl <= low) & ~(new >= old))


def _trust_region(
    batch: PolicyInputs, config: Mapping[str, Any], above: Tensor, below: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sg(ratio) log pi on tokens that are inside, or that the advantage pulls back in.

    Metrics: `actor/pg_clipfrac` (share of tokens that are masked), `actor/pg_clipfrac_lower` (share of tokens that are
    not, and whose ratio is truncated), as in verl.
    """
    outside = torch.where(batch.advantages > 0, above, below).detach()
    ratio = batch.log_ratio.exp().detach()
    truncated = ratio.clamp_max(config["clip_ratio_c"])
    token_loss = (-batch.advantages * truncated * batch.log_probs).where(~outside, 0.0)
    return batch.weighted(token_loss), batch.metrics(outside, ~outside & (ratio > config["clip_ratio_c"]))


@POLICY_LOSS.register("topr")
def topr(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi where A >= 0, and -sg(min(W, 1)) A log pi where A < 0, W = pi(y) / pi_old(y) of the whole response.

    Tapered off-policy REINFORCE (arXiv 2503.14286): good responses are imitated however unlikely they have become, bad
    ones are let go of. Metric `actor/pg_clipfrac`: share of tokens whose weight is cut to 1.
    """
    log_ratio, bad = batch.sequence_log_ratio.detach(), batch.advantages < 0
    weight = torch.where(bad, log_ratio.clamp_max(0).exp(), 1.0)
    clipped = bad & (log_ratio > 0)
    token_loss = -weight * batch.advantages * batch.log_probs
    return batch.weighted(token_loss), batch.metrics(clipped, torch.zeros_like(clipped))


@POLICY_LOSS.register("vespo")
def vespo(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(W^k exp(lambda (1 - W))) A log pi, W = pi(y) / pi_old(y) of the whole response.

    VESPO (arXiv 2602.10693): the weight is 1 on policy and falls off on both sides, with `vespo_k_pos` and
    `vespo_lambda_pos` where A >= 0, `vespo_k_neg` and `vespo_lambda_neg` where A < 0. The paper's W is against the
    sampler: set bypass_mode. Importance weights multiply the loss as everywhere here; TRL puts them into W.
    """
    good, log_ratio = batch.advantages >= 0, batch.sequence_log_ratio.detach()
    k = torch.where(good, config["vespo_k_pos"], config["vespo_k_neg"])
    decay = torch.where(good, config["vespo_lambda_pos"], config["vespo_lambda_neg"])
    weight = (k * log_ratio + decay * (1 - log_ratio.exp())).exp()
    return batch.weighted(-weight * batch.advantages * batch.log_probs), batch.ppo_kl()


# --- losses that treat a few tokens apart ----------------------------------------------------------------------------
# "The Entropy Mechanism of RL for Reasoning LMs" (arXiv 2505.22617): entropy falls by the covariance of log-prob and
# advantage, and a tiny share of the tokens carries most of it. Which tokens these are is a property of the whole batch:
# `token_selection` picks them once, before the batch is cut into micro-batches. A loss that is not told picks among the
# tokens it sees.
@POLICY_LOSS.register("clip_cov")
def clip_cov(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate without the selected tokens: a few, at random, of those with a high covariance.

    Metrics `actor/pg_clipfrac`, as in verl, and `actor/selected` are the share of these tokens.
    """
    selected = _selected("clip_cov", batch, config)
    token_loss, _ = clip(batch.log_ratio.exp(), batch.advantages, config)
    share = batch.share(selected)
    metrics = {"actor/pg_clipfrac": share, "actor/selected": share} | batch.ppo_kl()
    return batch.weighted(token_loss.where(~selected, 0.0)), metrics


@POLICY_LOSS.register("kl_cov")
def kl_cov(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A ratio, and `ppo_kl_coef` |log ratio| on top for the tokens with the highest covariance.

    Metric `actor/ppo_kl` is the mean of |log ratio|, as in verl.
    """
    selected = _selected("kl_cov", batch, config)
    distance = batch.log_ratio.abs()
    token_loss = -batch.advantages * batch.log_ratio.exp()
    token_loss = torch.where(selected, token_loss + config["ppo_kl_coef"] * distance, token_loss)
    metrics = {"actor/ppo_kl": masked_mean(distance, batch.response_mask), "actor/selected": batch.share(selected)}
    return batch.weighted(token_loss), metrics


def token_selection(
    name: str,
    *,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Mapping[str, Any],
    generator: torch.Generator | None = None,
) -> Tensor | None:
    """(N, T) bool: the tokens of the whole batch that loss `name` treats apart, or None if it does not.

    `kl_cov`: the share `kl_cov_ratio` with the highest covariance (at least one token). `clip_cov`: as many tokens
    as the share `clip_cov_ratio`, at random (`generator`, else torch's own) among those with a covariance between
    `clip_cov_lb` and `clip_cov_ub`.
    """
    if name not in TOKEN_SELECTING_LOSSES:
        return None
    mask = response_mask.bool()
    centred = [values.detach()[mask] - values.detach()[mask].mean() for values in (log_probs, advantages)]
    covariance = centred[0] * centred[1]
    tokens = len(covariance)
    if name == "kl_cov":
        picked = covariance.topk(min(tokens, max(1, int(tokens * config["kl_cov_ratio"])))).indices
    else:
        candidates = ((covariance > config["clip_cov_lb"]) & (covariance < config["clip_cov_ub"])).nonzero().flatten()
        count = max(1, int(tokens * config["clip_cov_ratio"]))
        picked = candidates[torch.randperm(len(candidates), generator=generator).to(candidates.device)[:count]]
    chosen = torch.zeros(tokens, dtype=torch.bool, device=mask.device)
    chosen[picked] = True
    return torch.zeros_like(mask).masked_scatter(mask, chosen)


def _selected(name: str, batch: PolicyInputs, config: Mapping[str, Any]) -> Tensor:
    if batch.selected is not None:
        return batch.selected.bool()
    selected = token_selection(
        name, log_probs=batch.log_probs, advantages=batch.advantages, response_mask=batch.response_mask, config=config
    )
    assert selected is not None
    return selected


def compute_policy_loss(
    columns: Mapping[str, Tensor], settings: ObjectiveSettings, **counts: float | Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the aggregated policy loss, the first term of `policy_objective`, and its metrics.

    Args:
        columns: (N, T) tensors: `log_probs`, `old_log_probs` (nats), `advantages` and `response_mask`; where there are
            any, `rollout_is_weights` and `selected_tokens` (see `PolicyInputs`), and `prompt_weights` (see
            `agg_loss`). Only `log_probs` get a gradient.
        counts: `global_tokens`, `global_sequences` and `global_prompts` of `agg_loss`.

    Returns:
        (loss, metrics): a float32 scalar, and means over the masked tokens of this call.
    """
    actor, old_log_probs, weights = settings.actor, columns["old_log_probs"], columns.get("rollout_is_weights")
    compared = {name: columns[name] for name in ("log_probs", "advantages", "response_mask")}
    aggregate.check_shapes("old_log_probs", old_log_probs, **compared)
    mask = columns["response_mask"].bool()
    batch = PolicyInputs(
        old_log_probs.detach().float().where(mask, 0.0),
        columns["log_probs"].float().where(mask, 0.0),
        columns["advantages"].detach().float().where(mask, 0.0),
        columns["response_mask"].float(),
        None if weights is None else weights.detach().float().where(mask, 1.0),
        columns.get("selected_tokens"),
    )
    token_loss, metrics = POLICY_LOSS.get(actor.policy_loss.loss_mode)(batch, settings.options)
    scale, of_prompts = actor.loss_scale_factor, columns.get("prompt_weights")
    loss = aggregate.agg_loss(
        token_loss,
        batch.response_mask,
        actor.loss_agg_mode,
        loss_scale_factor=scale,
        prompt_weights=of_prompts,
        **counts,
    )
    return loss, metrics
