"""What a trainer works with: the worker groups of its roles."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_dist.workers.gang import ActorGroup, ReferenceGroup
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout_group import RolloutGroup


@dataclass
class Roles:
    """The worker groups of a run, and how many of their workers may be replaced; `ref` is None where no KL term needs
    it.
    """

    actor: ActorGroup
    rollout: RolloutGroup
    reward: RewardPool
    ref: ReferenceGroup | None
    restarts: RestartBudget = field(default_factory=RestartBudget)

    @property
    def workers(self) -> list[WorkerGroup]:
        """The processes of all of them."""
        groups = [self.actor.workers, self.rollout.workers, self.reward.workers]
        return groups if self.ref is None else [*groups, self.ref.workers]

    def holds_state(self, role: str) -> bool:
        """Whether a role has what only a checkpoint has: the policy, or a reference that has moved."""
        return role == "actor" or (role == "ref" and self.ref is not None and self.ref.has_moved)
