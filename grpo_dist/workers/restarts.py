"""How many workers may be replaced before a run stops: faults are survived, but a run that only fails must end."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_dist.errors import GrpoDistError


@dataclass
class RestartBudget:
    """The replacements that the rollout, reward and reference workers of a run share.

    Attributes:
        most: workers that may be replaced (`trainer.max_worker_restarts`).
        failures: why each of those that were had to be.
    """

    most: int = 0
    failures: list[str] = field(default_factory=list)

    def spend(self, error: GrpoDistError) -> None:
        """Count a replacement.

        Raises:
            GrpoDistError: `error`, if there are none left.
        """
        if len(self.failures) >= self.most:
            if self.most:
                error.add_note(f"trainer.max_worker_restarts={self.most} workers were replaced before")
            raise error
        self.failures.append(str(error))
