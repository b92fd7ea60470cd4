"""What a policy loss is given, and the registry of policy losses.

Every policy loss has one signature,

    loss(batch: PolicyInputs, config: Mapping[str, Any]) -> (token_loss, metrics)

with `config` a mapping of verl's option names, token_loss (N, T) float32, still to be aggregated, importance weights
already applied, and metrics as means over the masked tokens of this call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from grpo_dist.algorithms.custom_results import policy_loss_fault
from grpo_dist.algorithms.masking import MAX_LOG_RATIO, bounded_log_ratio, masked_mean
from grpo_dist.plugins.registry import Registry

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

POLICY_LOSS: Registry[PolicyLoss] = Registry(
    "policy loss",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    ("batch", "config"),
    policy_loss_fault,
)


@dataclass(frozen=True)
class PolicyInputs:
    """A batch of N responses of up to T tokens; all tensors (N, T) float32, 0 off the mask (weights: 1).

    Attributes:
        old_log_probs: nats; the policy that is being improved on. No gradient.
        log_probs: nats; the current policy, carries the gradient.
        advantages: of each token.
        response_mask: 1 on the tokens that train.
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
