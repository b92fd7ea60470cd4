"""The restart budget: how many workers may be replaced before the run stops."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_dist.errors import GrpoDistError


@dataclass
class RestartBudget:
    """The number of replacements that the rollout, reward and reference workers of a run share.

    Attributes:
        most: workers that may be replaced (`trainer.max_worker_restarts`).
        failures: the error behind each replacement so far.
    """

    most: int = 0
    failures: list[str] = field(default_factory=list)

    def spend(self, error: GrpoDistError) -> None:
        """Count one replacement.

        Raises:
            GrpoDistError: `error`, if no replacement is left.
        """
        if len(self.failures) >= self.most:
            if self.most:
                error.add_note(f"trainer.max_worker_restarts={self.most} workers have already been replaced")
            raise error
        self.failures.append(str(error))
