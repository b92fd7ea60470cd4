"""What an advantage estimator is given, and the registry of estimators.

Every estimator has one signature,

    estimator(batch: AdvantageInputs, config: Mapping[str, Any]) -> (advantages, returns)

with `config` a mapping of verl's option names and both outputs (N, T) float32, 0 off the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grpo_dist.algorithms.advantage.groups import Groups
from grpo_dist.algorithms.custom_results import advantage_fault
from grpo_dist.errors import BatchError
from grpo_dist.registry import Registry

Estimator = Callable[..., tuple[Tensor, Tensor]]

ADVANTAGE: Registry[Estimator] = Registry(
    "advantage estimator", "algorithm.adv_estimator", ("batch", "config"), advantage_fault
)


@dataclass(frozen=True)
class AdvantageInputs:
    """A batch of N responses of up to T tokens, right-padded.

    Attributes:
        token_level_rewards: (N, T) float32; an outcome reward sits on the last response token.
        response_mask: (N, T) float32, 1 on the tokens that train.
        optional: what only some estimators need; they ask with `need`.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    optional: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> Tensor:
        """(N,) float64: the summed rewards of each response."""
        return self.token_level_rewards.double().sum(-1)

    @property
    def groups(self) -> Groups:
        """Which responses answer the same prompt."""
        return self.need("groups", "index", "compares responses to one prompt and needs their uids")

    def need(self, name: str, argument: str, why: str) -> Any:
        """An optional input.

        Raises:
            BatchError: it was not given.
        """
        value = self.optional.get(name)
        if value is None:
            raise BatchError(f"`{argument}` is missing: the advantage estimator {why}")
        return value

    def on_tokens(self, per_response: Tensor) -> Tensor:
        """(N,) values on every token of their response that trains: (N, T) float32."""
        return per_response.float().unsqueeze(-1) * self.response_mask
