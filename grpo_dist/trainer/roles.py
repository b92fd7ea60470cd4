"""The worker groups of a run, by role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import GrpoDistError
from grpo_dist.workers.gang import ActorGroup, CriticGroup, Gang, ReferenceGroup
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward_model import RewardModelGroup
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout_group import RolloutGroup


@dataclass
class Roles:
    """The worker groups of a run.

    Attributes:
        actor: trains the policy.
        rollout: the rollout engines.
        reward: the processes that score.
        ref: the frozen reference; None if no KL term needs reference workers.
        restarts: how many workers may be replaced.
        reward_model: the model that scores; None if there is none.
        critic: foresees returns; None if there is none.
    """

    actor: ActorGroup
    rollout: RolloutGroup
    reward: RewardPool
    ref: ReferenceGroup | None
    restarts: RestartBudget = field(default_factory=RestartBudget)
    reward_model: RewardModelGroup | None = None
    critic: CriticGroup | None = None

    @property
    def workers(self) -> list[WorkerGroup]:
        """The processes of all roles."""
        groups = [self.actor.workers, self.rollout.workers, self.reward.workers]
        return groups + [gang.workers for gang in (self.ref, self.reward_model, self.critic) if gang is not None]

    def holders(self) -> dict[str, Gang]:
        """The roles whose state only a checkpoint can restore, by name: those that train, a reference that has moved,
        and a reward model that was retrained.
        """
        found: dict[str, Gang] = {"actor": self.actor}
        if self.critic is not None:
            found["critic"] = self.critic
        if self.ref is not None and self.ref.has_moved:
            found["ref"] = self.ref
        if self.reward_model is not None and self.reward_model.has_moved:
            found["reward_model"] = self.reward_model
        return found

    async def take_printed(self, config: RunConfig) -> list[str]:
        """What custom code of the config has printed since the last call: a message for each kind that has."""
        actor, agent = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.agent
        if ":" in actor.policy_loss.loss_mode or ":" in actor.kl_loss_type:
            await self._collect("policy loss or KL estimator", self.actor.workers, range(len(self.actor.workers)))
        if not agent.is_single_turn:
            workers = self.rollout.workers
            ranks = [rank for rank in range(len(workers)) if not self.rollout.is_starting(rank)]
            await self._collect("agent loop", workers, ranks)
        return self.reward.printed.take()

    async def _collect(self, kind: str, workers: WorkerGroup, ranks: Sequence[int]) -> None:
        for found in await workers.outcomes([workers.submit(rank, "report", "take_printed") for rank in ranks]):
            if not isinstance(found, GrpoDistError):  # a lost process is told by its other calls
                self.reward.printed.note(kind, *found)
