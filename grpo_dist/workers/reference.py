"""The reference of the KL term; its ranks are plain `PolicyWorker`s."""

from __future__ import annotations

from grpo_dist.workers.gang import FrozenGroup, Gang


class ReferenceGroup(FrozenGroup):
    """The reference model of the KL term: the policy's start, or a teacher. Its weights change only in iterative GRPO
    (`move_towards`).
    """

    async def move_towards(self, actor: Gang, share: float) -> None:
        """Move the weights towards the actor's: share * actor + (1 - share) * reference."""
        self.has_moved = True
        buckets = (await actor.workers.ask_all("sync_reference", "export_parameters"))[0]
        await self.workers.ask_all("sync_reference", "load_weights", buckets, share)
