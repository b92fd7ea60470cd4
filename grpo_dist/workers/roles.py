"""The worker groups of a run, by role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import GrpoDistError
from grpo_dist.plan.roles import ModelPass
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.workers.gang import Gang

if TYPE_CHECKING:
    from grpo_dist.workers.actor import ActorGroup
    from grpo_dist.workers.gang import ReferenceGroup, TrainedGroup
    from grpo_dist.workers.reward import RewardPool
    from grpo_dist.workers.reward_model import RewardModelGroup
    from grpo_dist.workers.rollout import RolloutGroup


@dataclass
class Roles:
    """The worker groups of a run by role; those that the training loop itself calls are properties, for the types."""

    groups: dict[str, Gang | RolloutGroup | RewardPool]
    restarts: RestartBudget = field(default_factory=RestartBudget)

    @property
    def actor(self) -> ActorGroup:
        """The policy that trains."""
        return cast("ActorGroup", self.groups["actor"])

    @property
    def rollout(self) -> RolloutGroup:
        """The rollout engines."""
        return cast("RolloutGroup", self.groups["rollout"])

    @property
    def reward(self) -> RewardPool:
        """The processes that score."""
        return cast("RewardPool", self.groups["reward"])

    @property
    def reference(self) -> ReferenceGroup | None:
        """The frozen reference; None if no KL term needs reference workers."""
        return cast("ReferenceGroup | None", self.groups.get("ref"))

    @property
    def reward_model(self) -> RewardModelGroup | None:
        """The model that scores; None if there is none."""
        return cast("RewardModelGroup | None", self.groups.get("reward_model"))

    @property
    def critic(self) -> TrainedGroup | None:
        """The model that foresees returns; None if there is none."""
        return cast("TrainedGroup | None", self.groups.get("critic"))

    @property
    def workers(self) -> list[WorkerGroup]:
        """The processes of all roles."""
        return [group.workers for group in self.groups.values()]

    @property
    def gangs(self) -> dict[str, Gang]:
        """The roles whose ranks hold one model."""
        return {name: group for name, group in self.groups.items() if isinstance(group, Gang)}

    async def compute(self, row: ModelPass, needs: Sequence[str], batch: DataProtoRef) -> DataProtoRef:
        """Return the columns that a pass adds to a batch, of which it `needs` some besides the sequences."""
        return await self.gangs[row.role].compute_log_probs(row.limit or row.name, batch, row.method, needs=needs)

    def holders(self) -> dict[str, Gang]:
        """Return the roles whose state only a checkpoint can restore: those that train, or whose weights have moved."""
        return {name: gang for name, gang in self.gangs.items() if gang.has_moved}

    async def take_printed(self, config: RunConfig) -> list[str]:
        """Return what custom code of the config has printed since the last call: a message for each kind that has."""
        actor, agent = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.agent
        if ":" in actor.policy_loss.loss_mode or ":" in actor.kl_loss_type:
            await self._collect("policy loss or KL estimator", self.actor.workers, range(len(self.actor.workers)))
        if not agent.is_single_turn:
            workers = self.rollout.workers
            ranks = [rank for rank in range(len(workers)) if not self.rollout.is_starting(rank)]
            await self._collect("agent loop", workers, ranks)
        return self.reward.printed.take()

    async def _collect(self, kind: str, workers: WorkerGroup, ranks: Sequence[int]) -> None:
        for printed in await workers.outcomes([workers.submit(rank, "report", "take_printed") for rank in ranks]):
            if not isinstance(printed, GrpoDistError):  # a lost process is told by its other calls
                self.reward.printed.note(kind, *printed)
