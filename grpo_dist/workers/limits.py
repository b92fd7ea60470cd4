"""How long a worker may take to answer, by stage. One that takes longer counts as hung."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that a call may take.

    Attributes:
        default_s: of every stage but those in `stage_s`.
        stage_s: by the stage's name, as an error report gives it ("generate", "update", ...).
    """

    default_s: float
    stage_s: Mapping[str, float] = field(default_factory=dict)

    def of(self, stage: str) -> float:
        """Seconds that a call of this stage may take."""
        return self.stage_s.get(stage, self.default_s)
